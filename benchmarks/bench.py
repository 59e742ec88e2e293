"""What sections are given: options, prompts, and the peers of this run. Knows how to start peers; knows no tables."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.export_gguf import export as export_gguf
from benchmarks.export_hf import export as export_hf
from benchmarks.peers import KINDS, Peer, PeerFailed
from shoal.model_files import FileFormat, open_model

Marks = list[list[float]]  # seconds at which each prompt got each of its tokens


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    model: str
    dtype: str
    threads: int
    lengths: tuple[int, ...]  # prompt tokens
    repeats: int
    peers: tuple[str, ...]
    folder: Path  # exported weights, logs, results


@dataclass
class Bench:
    """Starts peers on demand and asks them in turn."""

    options: Options
    skipped: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print
    _peers: dict[str, Peer] = field(default_factory=dict)

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        """Arbitrary ids, the same for everybody."""
        vocab = open_model(self.options.model).config.shape.vocab_size
        return [random.Random(1000 * seed + num_tokens).randrange(10, vocab - 10) for _ in range(num_tokens)]

    def peers(self, names: Sequence[str] | None = None) -> dict[str, Peer]:
        """The asked-for ones that run, started now where needed. One that does not is noted in `skipped`."""
        for name in self.options.peers:
            if (names is None or name in names) and name not in self._peers and name not in self.skipped:
                self.say(f"starting {name} …")
                try:
                    self._peers[name] = Peer(KINDS[name], self._driver_options(name), self.options.folder / f"{name}.log")
                    self.about[name] = self._peers[name].about
                except (PeerFailed, OSError) as error:
                    self.skipped[name] = str(error)
                    self.say(f"skipping {name}: {error}")
        return {name: peer for name, peer in self._peers.items() if names is None or name in names}

    def alternate(self, runs: Mapping[str, Callable[[], Marks]], repeats: int) -> dict[str, list[Marks]]:
        """Each run once to warm up, then rounds of each in turn. One that fails is dropped and noted in `skipped`."""
        taken: dict[str, list[Marks]] = {}
        for turn in range(-1, repeats):
            for name, run in runs.items():
                if name in self.skipped:
                    continue
                try:
                    marks = run()
                except PeerFailed as error:
                    self.skipped[name] = str(error)
                    self.say(f"skipping {name}: {error}")
                    taken.pop(name, None)
                    continue
                if turn >= 0:
                    taken.setdefault(name, []).append(marks)
        return taken

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _driver_options(self, name: str) -> dict[str, Any]:
        options, model = self.options, open_model(self.options.model)
        folder = options.folder / "weights"
        files: dict[str, str] = {}
        if name in ("vllm", "transformers"):
            target = folder / "hf"
            if not (target / "model.safetensors").exists():
                export_hf(options.model, target)
            files["folder"] = str(target)
        if name.startswith("llama.cpp"):
            if model.format is not FileFormat.GGUF:
                raise PeerFailed(f"{options.model} is no GGUF file")
            target = folder / "bf16.gguf"
            if not target.exists():
                partial = target.with_suffix(".part")
                export_gguf(options.model, partial).rename(target)
            files |= {"gguf_bf16": str(target), "gguf_packed": str(model.path)}
        return {
            "model": options.model,
            "dtype": options.dtype,
            "threads": options.threads,
            "max_context": model.config.shape.max_context,
            "max_tokens": 16384,
            "max_streams": 16,
            **files,
        }
