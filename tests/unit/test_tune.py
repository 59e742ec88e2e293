"""Tuning runs on a tiny model: they learn, go on after a kill to the same adapter, share the work, and stop where they must."""

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from shoal.cli.tune import tune as command
from shoal.errors import InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files import open_model
from shoal.model_files.adapter import ADAPTER_NOTES, ADAPTER_WEIGHTS
from shoal.quality.tune.checkpoint import STATE_FILE
from shoal.quality.tune.options import TuneOptions
from shoal.quality.tune.run import TuneResult, tune
from shoal.quality.tune.trainer import Pace, StepReport
from shoal.types import DType
from shoal.visibility import Visibility
from tests import engine_support as support

OFTEN = Pace(checkpoint_s=0.0, measure_s=0.0)
MODEL = str(support.model_files("llama").path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words in an order that can be learnt."""
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    lines = ["one two three four five six seven eight nine ten " * 6 + f"and then {number}" for number in range(12)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts with responses, all of one length."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    pairs = [{"prompt": f"say {number} to me", "response": "one two three"} for number in range(10, 26)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def options(visibility: str = "speed:2", **changes: Any) -> TuneOptions:
    small: dict[str, Any] = {
        "tokens": 6 * 64,
        "rank": 4,
        "alpha": 8.0,
        "first_layer": 1,
        "warmup_steps": 2,
        "sequence_tokens": 32,
        "batch_sequences": 2,
        "response_tokens": (4, 8),
        "dtype": DType.FLOAT32,
    }
    return TuneOptions(Visibility.parse(visibility), **(small | changes))


def run(data: str, folder: Path, chosen: TuneOptions | None = None, **changes: Any) -> TuneResult:
    return tune(MODEL, data, folder, chosen or options(), num_threads=1, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / ADAPTER_WEIGHTS)
    return found


def assert_same(one: Path, other: Path, atol: float = 0.0) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=0.0, atol=atol), name


def test_distillation_closes_the_gap(text: str, tmp_path: Path) -> None:
    losses: list[float] = []
    chosen = options(tokens=60 * 64, learning_rate=5e-3, candidates=0)
    run(text, tmp_path, chosen, told=lambda report: losses.append(report.loss))
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(
    ("visibility", "changes"),
    [
        ("full", {"supervised": True}),
        ("speed:2", {"supervised": True}),
        ("speed:1:anchors=2", {"gradient_checkpointing": True, "dtype": DType.BFLOAT16}),
    ],
)
def test_every_kind_of_run_writes_an_adapter_that_is_served(
    visibility: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    run(text, tmp_path, options(visibility, **changes))
    adapter = open_model(MODEL, str(tmp_path)).adapter
    assert adapter is not None and str(adapter.visibility) == visibility
    assert any(float(tensor.abs().sum()) > 0 for name, tensor in weights(tmp_path).items() if "lora_B" in name)


def test_the_distilled_control_has_nothing_to_learn(text: str, tmp_path: Path) -> None:
    losses: list[float] = []
    run(text, tmp_path, options("full"), told=lambda report: losses.append(report.loss))
    assert max(losses) < 1e-6
    assert all(float(tensor.abs().max()) < 1e-2 for name, tensor in weights(tmp_path).items() if "lora_B" in name)


def test_a_killed_run_goes_on_to_the_same_adapter(text: str, tmp_path: Path) -> None:
    run(text, tmp_path / "whole")

    def kill(report: StepReport) -> None:
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path / "killed", pace=OFTEN, told=kill)
    notes = json.loads((tmp_path / "killed" / ADAPTER_NOTES).read_text())
    assert notes["steps"] == [3, 6] and open_model(MODEL, str(tmp_path / "killed")).adapter  # usable as it is
    steps: list[int] = []
    run(text, tmp_path / "killed", told=lambda report: steps.append(report.step))
    assert steps == [4, 5, 6]
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_checkpoint_of_another_run_is_not_gone_on_from(text: str, tmp_path: Path) -> None:
    run(text, tmp_path)
    with pytest.raises(InvalidConfig, match="is of a run with other options"):
        run(text, tmp_path, options(rank=2))
    run(text, tmp_path, options(rank=2), restart=True)
    (tmp_path / STATE_FILE).write_bytes(b"{}")
    with pytest.raises(InvalidConfig, match=r"cannot be read .* remove it to begin anew"):
        run(text, tmp_path)


def test_a_run_that_diverges_stops_and_keeps_the_last_good_checkpoint(text: str, tmp_path: Path) -> None:
    steps: list[int] = []
    with pytest.raises(InvalidRequest, match=r"training has diverged.*a lower --learning-rate than 1e\+35"):
        run(text, tmp_path, options(learning_rate=1e35, warmup_steps=0), pace=OFTEN, told=lambda r: steps.append(r.step))
    state = load_file(tmp_path / STATE_FILE)
    assert steps and all(torch.isfinite(tensor).all() for tensor in state.values())
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())


def test_held_out_text_is_measured_before_and_after(text: str, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "one two three four five six seven eight nine ten " * 60}) + "\n")
    result = run(text, tmp_path / "out", options(tokens=40 * 64, learning_rate=1e-2), held_out=str(long), num_held_out=2)
    assert result.perplexity_before is not None and result.perplexity_after is not None
    assert 1 < result.perplexity_after < math.inf
    assert result.perplexity_full is not None and result.perplexity_full != result.perplexity_before
    notes = json.loads((tmp_path / "out" / ADAPTER_NOTES).read_text())
    assert [point["tokens"] for point in notes["curve"]] == [0, result.num_tokens]
    assert notes["visibility"] == "speed:2" and notes["base_revision"] == open_model(MODEL).revision


def test_two_processes_share_a_step_and_give_what_one_gives(prompts: str, tmp_path: Path) -> None:
    """Also when only the first one's clock says that a checkpoint is due."""
    run(prompts, tmp_path / "one", options(tokens=60, batch_sequences=2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        "import os, sys; from pathlib import Path; from tests.unit.test_tune import Pace, options, run\n"
        "pace = Pace(checkpoint_s=0 if os.environ['RANK'] == '0' else 1e9)\n"
        "run(sys.argv[1], Path(sys.argv[2]), options(tokens=60, batch_sequences=1), pace=pace)"
    )
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(["src", "."]), "GLOO_SOCKET_IFNAME": "lo"}
    # MODEL is made anew in each process: equal arguments write equal bytes, so all three have one revision
    started = [
        subprocess.Popen([sys.executable, "-c", program, prompts, str(tmp_path / "two")], env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    assert_same(tmp_path / "one", tmp_path / "two", atol=1e-5)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a question"}, "has a prompt and no response"),
        ({"text": "too short"}, "less than one window of 32"),
        ({"prompt": "word " * 600, "response": "yes"}, "exceeds the model's context"),
    ],
)
def test_data_that_cannot_work_is_refused_with_words(line: dict[str, str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(InvalidConfig, match=words):
        run(str(path), tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: options("pop:2"), Unsupported, "pop is made to work without tuning"),
        (lambda: options(rank=0), InvalidConfig, "rank must be at least 1, not 0"),
        (lambda: options(learning_rate=math.nan), InvalidConfig, "learning_rate must be a number greater than 0"),
        (lambda: options(response_tokens=(4, 32)), InvalidConfig, "response_tokens must be lengths of 1…31"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Callable[[], TuneOptions], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (options(sequence_tokens=600), "sequence_tokens of 600 tokens exceeds the model's context of 512"),
        (options(first_layer=4), "first_layer 4 leaves nothing to tune of 4 layers"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(chosen: TuneOptions, words: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=words):
        run(text, tmp_path, chosen)


def test_the_command_says_what_it_made(text: str, tmp_path: Path) -> None:
    arguments = [MODEL, "-v", "speed:2", "--data", text, "-o", str(tmp_path / "out"), "--tokens", "128", "--rank", "2"]
    arguments += ["--sequence-tokens", "32", "--response-tokens", "4,8", "--first-layer", "2", "--threads", "1"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert "step 4 of 4: loss" in done.stderr
    assert "parameters, 128 tokens in" in done.stdout
    refused = CliRunner().invoke(command, [*arguments, "--response-tokens", "4,x"])
    assert refused.exit_code == 2 and "--response-tokens '4,x' must be numbers" in refused.stderr
