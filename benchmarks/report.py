"""The report: what the sections measured, kept as JSON between runs, written as one Markdown page. Knows files only."""

import json
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Options
from benchmarks.tables import Table


@dataclass(frozen=True, slots=True)
class SectionResult:
    """One section's tables and the circumstances of their run."""

    tables: tuple[Table, ...]
    commit: str
    when: str  # UTC
    machine: str
    setting: str  # model, dtype, threads, repetitions
    about: Mapping[str, str]  # peer → version
    skipped: Mapping[str, str]  # peer → why

    def to_json(self) -> dict[str, Any]:
        fields = ("commit", "when", "machine", "setting", "about", "skipped")
        return {"tables": [table.to_json() for table in self.tables], **{name: getattr(self, name) for name in fields}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SectionResult":
        return cls(**{**data, "tables": tuple(Table.from_json(table) for table in data["tables"])})


def circumstances(options: Options) -> dict[str, str]:
    """Commit, time, machine and setting of a run that begins now."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    repeats = f"{options.repeats} repetition{'' if options.repeats == 1 else 's'} after one to warm up"
    setting = f"{options.model}, {options.dtype}, {options.threads} threads, {repeats}"
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return {"commit": commit or "unknown", "when": now, "machine": machine(), "setting": setting}


def machine() -> str:
    """The processor, its cores, and what multiplies on it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = values.get("flags", "").split()
    units = [label for flag, label in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX-512 BF16")) if flag in flags]
    units = units or ["AVX2" if "avx2" in flags else "no vector unit"]
    cores = sum(line.startswith("processor") for line in lines)
    return f"{values.get('model name', platform.processor())}, {cores} cores, {', '.join(units)}"


def read_results(path: Path) -> dict[str, SectionResult]:
    """Sections measured before; none when there is no such file."""
    if not path.exists():
        return {}
    return {name: SectionResult.from_json(data) for name, data in json.loads(path.read_text()).items()}


def write_results(path: Path, results: Mapping[str, SectionResult]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: result.to_json() for name, result in results.items()}, indent=1))


def write_report(path: Path, results: Mapping[str, SectionResult], order: Iterable[str], plots: Mapping[str, Path]) -> None:
    """The page, sections in `order`; `plots`: table title → picture. Sections without results stay as the page has them."""
    written = _written(path)
    guide = "[performance.md](performance.md)" if path.with_name("performance.md").exists() else "docs/performance.md"
    parts = [
        "# Benchmarks",
        f"Written by `make bench` (`python -m benchmarks`); {guide} says what the figures mean and how "
        "to install the peers. Median (least–most); all engines run on the same weights, type, threads and prompts, in turn, "
        "each in a process of its own that is stopped while another one is measured.",
    ]
    for name in order:
        if name not in results:
            parts += [written[name]] if name in written else []
            continue
        result = results[name]
        parts.append(f"## {name}")
        parts.append(f"Commit {result.commit}, {result.when} UTC. {result.machine}. {result.setting}.")
        if result.about:
            parts.append("\n".join(f"- {peer}: {about}" for peer, about in result.about.items()))
        if result.skipped:
            parts.append("\n".join(f"- {peer} was skipped: {why}" for peer, why in result.skipped.items()))
        for table in result.tables:
            parts.append(table.markdown())
            if table.title in plots:
                parts.append(f"![{table.title}]({plots[table.title].relative_to(path.parent)})")
    path.write_text("\n\n".join(parts) + "\n")


def _written(path: Path) -> dict[str, str]:
    """The sections of a page that was written before, by name."""
    text = path.read_text() if path.exists() else ""
    sections = re.split(r"^(?=## \S+$)", text, flags=re.MULTILINE)[1:]
    return {section.split("\n", 1)[0].removeprefix("## "): section.strip() for section in sections}
