"""`make bench`'s frame: refusals in words, a peer that is missing, one that dies, tables, and a report merged from parts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import plots, report
from benchmarks.bench import Bench, Options
from benchmarks.peers import KINDS, Peer, PeerFailed, PeerKind
from benchmarks.sections import SECTIONS
from benchmarks.tables import Row, Table

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import sys
sys.path.insert(0, {drivers!r})
from lines import serve
def load(options):
    print("chatter of a library")
    def generate(prompts, num_tokens):
        if num_tokens == 13:
            sys.exit("an unlucky number")
        for _ in range(num_tokens):
            yield list(range(len(prompts)))
    return "fake 1.0", generate
serve(load)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads must lie in 1…"),
        (["--threads", "100000"], "--threads must lie in 1…"),
        (["--peers", "shoal,fast"], "unknown peer 'fast'; known: shoal, vllm"),
        (["--section", "speed"], "unknown section 'speed'; known: first-token"),
        (["--lengths", "512,many"], "--lengths '512,many' is no comma-separated list"),
        (["--lengths", "9000"], "--lengths must lie in 16…8128 for smollm2-135m"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--section", "streams", "--peers", " , "], "--peers names no engine"),
        (["--section", "first-token", "--peers", "vllm"], "vllm: SHOAL_BENCH_VLLM=/no/python does not exist"),
    ],
)
def test_bad_input_is_refused_before_any_work(arguments: list[str], message: str, tmp_path: Path) -> None:
    from benchmarks.__main__ import main

    arguments = ["benchmarks", *arguments, "--folder", str(tmp_path / "bench")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        patch.setenv("SHOAL_BENCH_VLLM", "/no/python")
        errors: list[str] = []
        patch.setattr(sys.stderr, "write", lambda text: errors.append(text) or len(text))
        assert main() == 2
    assert message in "".join(errors)
    assert not (tmp_path / "bench").exists()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PeerKind:
    """A peer whose tokens cost nothing."""
    (tmp_path / "fake_driver.py").write_text(DRIVER.format(drivers=str(ROOT / "benchmarks" / "drivers")))
    monkeypatch.setattr("benchmarks.peers._DRIVERS", tmp_path)
    kind = PeerKind("fake", "fake_driver.py", "json", None)
    monkeypatch.setitem(KINDS, "fake", kind)
    return kind


def options(folder: Path, peers: tuple[str, ...]) -> Options:
    return Options("smollm2-135m", "bfloat16", 1, (32,), 2, peers, folder)


def process_state(pid: int) -> str:
    """One letter, as Linux has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_is_asked_over_lines_and_stopped_between(fake: PeerKind, tmp_path: Path) -> None:
    peer = Peer(fake, {"threads": 1}, tmp_path / "log")
    try:
        assert peer.about == "fake 1.0"
        marks = peer.generate([[1, 2], [3]], 4)
        assert [len(own) for own in marks] == [4, 4] and marks[0] == sorted(marks[0])
        deadline = time.monotonic() + 5
        while (state := process_state(peer._process.pid)) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)  # a signal is sent before it is delivered
        assert state == "T"
        with pytest.raises(PeerFailed, match="fake ended: an unlucky number"):
            peer.generate([[1]], 13)
    finally:
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(peer._process.pid, 0)


def test_who_is_missing_or_dies_is_skipped_and_said_so(fake: PeerKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(KINDS, "gone", PeerKind("gone", "fake_driver.py", "no_such_module", "SHOAL_BENCH_GONE"))
    said: list[str] = []
    bench = Bench(options(tmp_path, ("fake", "gone")), say=said.append)
    try:
        peers = bench.peers()
        assert list(peers) == ["fake"]
        assert "name a Python that has it in SHOAL_BENCH_GONE" in bench.skipped["gone"]
        taken = bench.alternate({"fake": lambda: peers["fake"].generate([[1]], 2)}, 3)
        assert [len(marks[0]) for marks in taken["fake"]] == [2, 2, 2]
        assert bench.alternate({"fake": lambda: peers["fake"].generate([[1]], 13)}, 2) == {}
        assert "an unlucky number" in bench.skipped["fake"] and any("skipping fake" in text for text in said)
        assert bench.prompt(8) == bench.prompt(8) != bench.prompt(8, seed=1)
    finally:
        bench.close()


def test_tables_survive_json_and_show_ratios() -> None:
    rows = (Row("512", {"shoal": (10.0, 12.0, 11.0), "peer": (20.0, 22.0)}), Row("2,048", {"shoal": (1500.0,)}))
    table = Table("First", "prompt", "ms", rows, base="shoal", note="A note.", marks={"peer": "at most 0.8"})
    assert Table.from_json(json.loads(json.dumps(table.to_json()))) == table
    lines = table.markdown().splitlines()
    assert lines[4] == "| prompt | shoal, ms | peer, ms | shoal / peer |"
    assert lines[6] == "| 512 | 11.0 (10.0–12.0) | 21.0 (20.0–22.0) | 0.52 |"
    assert lines[7] == "| 2,048 | 1,500 | – | – |"
    assert "Marks: shoal / peer at most 0.8." in lines


def test_a_table_that_nobody_is_in_gets_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plots.draw([Table("First", "prompt", "ms", (Row("512", {}),))], tmp_path) == {}


def test_sections_of_several_runs_become_one_report(tmp_path: Path) -> None:
    table = Table("First", "prompt", "ms", (Row("512", {"shoal": (10.0,)}),))
    under = report.circumstances(options(tmp_path, ("shoal",)))
    results = {"decoding": report.SectionResult((table,), **under, about={"shoal": "x"}, skipped={"vllm": "not here"})}
    report.write_results(tmp_path / "results.json", results)
    kept = report.read_results(tmp_path / "results.json")
    assert kept == results
    kept["first-token"] = kept["decoding"]
    report.write_report(tmp_path / "page.md", kept, SECTIONS, {})
    page = (tmp_path / "page.md").read_text()
    assert page.index("## first-token") < page.index("## decoding")
    assert "vllm was skipped: not here" in page and under["commit"] in page and "1 threads" in page
    again = {"streams": kept.pop("first-token")}  # as in a fresh clone: what it has not measured stays as it was written
    report.write_report(tmp_path / "page.md", again, SECTIONS, {})
    after = (tmp_path / "page.md").read_text()
    assert page.partition("## first-token")[2].strip() == after.partition("## first-token")[2].partition("## streams")[0].strip()
    assert "## decoding" in after and "## streams" in after


def test_the_command_lists_what_it_knows() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert all(name in text for name in SECTIONS) and "shoal itself" in text
