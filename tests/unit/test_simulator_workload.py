"""Traces of every format, their bad rows, spreading of bucketed stamps, and what distributions draw."""

import json
import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.errors import InvalidConfig
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest, in_order, limited, scaled
from shoal.simulator.workload.trace_files import TraceNotes, read_trace


def read(path: Path, text: str, *, strict: bool = False) -> tuple[list[SimRequest], TraceNotes]:
    path.write_text(text)
    notes = TraceNotes()
    return list(read_trace(path, notes, strict=strict)), notes


FORMATS = {
    "azure": (
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        [(0.0, 374, 44), (4.314579, 396, 109)],
    ),
    "azure 2024": (
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.00993+00:00,2162,5\n2024-05-10 00:00:01.00993+00:00,10,6\n",
        [(0.0, 2162, 5), (1.0, 10, 6)],
    ),
    "burstgpt": (
        "b.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,log\n9,GPT-4,10,0,10,log\n",
        [(5.0, 472, 18)],
    ),
    "servegen": ("s.csv", "client_id,arrival_s,input_tokens,output_tokens\n57,1.414,73,1\n", [(1.414, 73, 1)]),
    "servegen images": (
        "s.csv",
        "client_id,arrival_s,text_tokens,output_tokens,image_tokens,image_count\n24,0.5,50,18,9,1\n",
        [(0.5, 59, 18)],
    ),
    "ours": ("o.csv", "arrival_s,input_tokens,output_tokens\n0.0,5,6\n", [(0.0, 5, 6)]),
    "ours as JSONL": ("o.jsonl", '{"arrival_s": 0.25, "input_tokens": 5, "output_tokens": 6}\n', [(0.25, 5, 6)]),
    "mooncake": (
        "m.jsonl",
        '{"timestamp": 40, "input_length": 1024, "output_length": 3, "hash_ids": [7, 9]}\n',
        [(0.04, 1024, 3)],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path: Path, name: str) -> None:
    file, text, expected = FORMATS[name]
    requests, notes = read(tmp_path / file, text)
    found = [(round(r.arrival_s, 6), r.num_prompt_tokens, r.num_output_tokens) for r in requests]
    assert found == expected
    assert notes.num_malformed == 0 and notes.num_failed_at_source == (name == "burstgpt")
    if name == "mooncake":
        assert requests[0].prefix_hashes == (7, 9)


def test_malformed_rows_are_counted_with_their_lines_or_refused(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens\n0,5,6\n1,,6\n2,5\n3,5,0\n4,-1,3\n5,1.5,3\nnan,5,6\n6,5,6\n"
    requests, notes = read(tmp_path / "x.csv", text)
    assert [r.arrival_s for r in requests] == [0, 6]
    assert notes.num_malformed == 6 and notes.malformed_lines == [3, 4, 5, 6, 7, 8] and notes.num_rows == 8
    with pytest.raises(InvalidConfig, match="line 3"):
        read(tmp_path / "x.csv", text, strict=True)
    jsonl = '{"arrival_s": 0, "input_tokens": 5, "output_tokens": 6}\nnot json\n[1]\n'
    requests, notes = read(tmp_path / "x.jsonl", jsonl)
    assert len(requests) == 1 and notes.malformed_lines == [2, 3]


def test_unknown_formats_are_told_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="azure: ContextTokens"):
        read(tmp_path / "x.csv", "when,in,out\n1,2,3\n")
    with pytest.raises(InvalidConfig, match="mooncake"):
        read(tmp_path / "x.jsonl", "")
    with pytest.raises(InvalidConfig, match="cannot read the trace"):
        list(read_trace(tmp_path / "absent.csv", TraceNotes()))


def test_bucketed_stamps_are_spread_up_to_the_next(tmp_path: Path) -> None:
    rows = [0] * 6 + [3000] * 3 + [9000, 9000]
    text = "".join(f'{{"timestamp": {stamp}, "input_length": 9, "output_length": 1}}\n' for stamp in rows)
    requests, _ = read(tmp_path / "m.jsonl", text)
    assert [r.arrival_s for r in requests] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 9, 9]


def test_scaling_limits_and_order() -> None:
    requests = [SimRequest(float(second), 1, 1) for second in range(10)]
    assert [r.arrival_s for r in scaled(requests, 2.0)] == [second / 2 for second in range(10)]
    assert len(list(limited(requests, num_requests=3, duration_s=None))) == 3
    assert len(list(limited(requests, num_requests=None, duration_s=4.5))) == 5
    with pytest.raises(InvalidConfig, match="request 2 arrives"):
        list(in_order([requests[1], requests[0]]))
    for wrong in (0.0, -1.0):
        with pytest.raises(InvalidConfig):
            scaled(requests, wrong)


def test_arrivals_have_the_rate_and_the_cv_that_were_asked_for() -> None:
    for cv in (0.5, 1.0, 3.0):
        requests = list(drawn(Arrivals(4.0, cv), Lengths(100), Lengths(10), 20_000, seed=1))
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
        assert mean(gaps) == pytest.approx(0.25, rel=0.06)
        assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.08)
    daily = list(drawn(Arrivals(4.0, 1.0, 0.9, 100.0), Lengths(100), Lengths(10), 8_000, seed=1))
    high = sum(1 for r in daily if r.arrival_s % 100 < 50)
    assert daily[-1].arrival_s == pytest.approx(2000, rel=0.06) and high / len(daily) == pytest.approx(
        0.5 + 0.9 / 3.1416, abs=0.02
    )


def test_lengths_and_seeds() -> None:
    rng = random.Random(0)
    values = [Lengths(1000, 1.0).draw(rng) for _ in range(20_000)]
    assert mean(values) == pytest.approx(1000, rel=0.03) and stdev(values) / mean(values) == pytest.approx(1.0, rel=0.1)
    assert Lengths(7).draw(rng) == 7
    draws = [list(drawn(Arrivals(1.0), Lengths(100, 1.0), Lengths(10, 1.0), 50, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    for wrong in (lambda: Lengths(0), lambda: Lengths(5, -1), lambda: Arrivals(0), lambda: Arrivals(-1), lambda: Arrivals(1, 0)):
        with pytest.raises(InvalidConfig):
            wrong()
    with pytest.raises(InvalidConfig):
        list(drawn(Arrivals(1), Lengths(1), Lengths(1), 0, 0))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["simulate", "--model", "llama-3.1-8b", *arguments])
    return result.exit_code, result.output


def test_the_command_prints_tables_json_and_a_csv_of_requests(tmp_path: Path) -> None:
    workload = ("--rate", "10/s", "--requests", "30", "--output", "20")
    code, text = run("--prefill", "1", "--decode", "1xh100", "--decode", "1xa100", "--visibility", "speed:24", *workload)
    assert code == 0 and "TTFT" in text and "decode KV memory" in text and "USD per million" in text
    path = tmp_path / "requests.csv"
    code, text = run("--colocated", "2xh100:tp2", *workload, "--format", "json", "--csv", str(path))
    assert code == 0 and json.loads(text)["num_finished"] == 30 and json.loads(text)["num_gpus"] == 4
    assert len(path.read_text().splitlines()) == 31
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n1,x,6\n")
    code, text = run("--colocated", "1", "--trace", str(trace))
    assert code == 0 and "skipped 1 malformed of 2 rows (lines 3)" in text and "1 requests served" in text


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--rate", "0"), "more than zero"),
        (("--rate", "-3/s"), "more than zero"),
        (("--rate", "1", "--load", "0"), "makes no sense"),
        (("--rate", "1", "--batch", "0"), "at least 1"),
        (("--rate", "1", "--slo-ttft", "5"), "a time with a unit"),
        (("--rate", "1", "--visibility", "speed:33"), "exceeds the model's 32 layers"),
        (("--rate", "1", "--prefill", "1"), "or --colocated instead"),
        (("--rate", "1", "--colocated", "two"), "is no pool"),
        (("--rate", "1", "--prefix-cache", "some"), "is not one of 'none', 'prefill', 'decode', 'both'"),
        ((), "either --trace FILE or --rate"),
    ],
)
def test_the_command_refuses_with_words(extra: tuple[str, ...], words: str) -> None:
    code, text = run("--colocated", "1", "--link", "100gbe", *extra)
    assert code == 2 and words in text, text


def test_a_model_that_does_not_fit_is_told_the_bytes() -> None:
    result = CliRunner().invoke(cli, ["simulate", "--model", "llama-3.1-70b", "--colocated", "1", "--rate", "1"])
    assert result.exit_code == 2 and "141.1 GB of weights" in result.output
