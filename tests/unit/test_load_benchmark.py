"""The load generator's arithmetic: prompts that share what they say they share, clipping, goodput; and both loops' order."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.load.__main__ import command
from benchmarks.load.asks import Ask, Fit, plan
from benchmarks.load.figures import figures
from benchmarks.load.loops import Answer, Caller, Run, closed_loop, open_loop
from benchmarks.load.options import visibilities_of
from shoal.client import Chunk, Completion
from shoal.client.types import Timings, Transfer
from shoal.errors import CapacityExceeded
from shoal.simulator.cluster.spec import Slo
from shoal.simulator.workload.requests import SimRequest
from shoal.types import FinishReason
from shoal.visibility import Visibility


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def prompts(asks: list[Ask], seed: str = "0") -> list[list[int]]:
    return [ask.token_ids(seed, 50_000) for ask in asks]


def test_lengths_are_scaled_and_what_exceeds_the_context_is_cut_and_told() -> None:
    asks, clipped = plan([SimRequest(0, 100, 20), SimRequest(1, 4000, 3000), SimRequest(2, 1, 1)], Fit(512, scale=0.5))
    assert [(ask.num_prompt_tokens, ask.max_tokens) for ask in asks] == [(50, 10), (256, 256), (1, 1)]
    assert (clipped.num_requests, clipped.num_prompts, clipped.num_answers) == (3, 1, 1)
    assert clipped.lost_share == pytest.approx((2000 + 1500 - 512) / (60 + 3500 + 2))
    assert "1 prompts and 1 answers of 3 requests" in clipped.words()
    assert plan([SimRequest(0, 100, 20)], Fit(512))[1].words() == ""


def test_prompts_share_a_system_prompt_and_the_traces_blocks_and_nothing_else() -> None:
    requests = [SimRequest(0, 1100, 5, (1, 2, 3)), SimRequest(0, 1500, 5, (1, 2, 4)), SimRequest(0, 90, 5)]
    asks, _ = plan(requests, Fit(4096, scale=0.1, system_tokens=7))
    one, other, third = prompts(asks)
    assert [len(prompt) for prompt in (one, other, third)] == [117, 157, 16]
    assert common_prefix(one, other) == 7 + 2 * 51
    assert common_prefix(one, third) == 7
    assert prompts(asks) == prompts(asks) and common_prefix(one, prompts(asks, "1")[0]) == 0


def test_each_turn_repeats_the_prompts_before_it() -> None:
    asks, _ = plan([SimRequest(0, 10, 1)] * 6, Fit(512, turns=3))
    first, other, second, _, third, _ = prompts(asks)
    assert [len(first), len(second), len(third)] == [10, 20, 30]
    assert second[:10] == first and third[:20] == second
    assert common_prefix(first, other) == 0


def test_goodput_counts_what_met_both_targets_among_all_that_was_asked() -> None:
    def answer(status: str = "OK", ttft_s: float | None = 0.5, tpot_s: float | None = 0.02, **changes: Any) -> Answer:
        return Answer("full", 0, 0.0, 0.0, status, 100, 10, ttft_s=ttft_s, tpot_s=tpot_s, **changes)

    answers = (
        answer(cached_tokens=50, uncomputed_tokens=60, prefill_at="prefill_worker"),
        answer(tpot_s=None),
        answer(ttft_s=1.5),
        answer(tpot_s=0.2),
        answer("RESOURCE_EXHAUSTED", None, None),
    )
    found = figures("full", [Run(answers[:3], 2.0), Run(answers[3:], 2.0)], Slo(1.0, 0.1))
    assert (found.goodput_per_s, found.goodput_share) == (0.5, 0.4)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (1.0, 10.0, 110.0)
    assert found.statuses == {"OK": 4, "RESOURCE_EXHAUSTED": 1}
    assert (found.cached_share, found.uncomputed_share, found.transferred_share) == (0.125, 0.15, 0.25)
    nothing = figures("full", [Run((answers[4],), 1.0)], Slo())
    assert (nothing.goodput_share, nothing.ttft_s.p50, nothing.cached_share) == (0.0, None, 0.0)


class Scripted:
    """A service that takes 20 ms a request, refuses prompts of one token and counts how many it had at once."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def generate(self, prompt: Any = None, *, timeout_s: float | None = None, **options: Any) -> AsyncGenerator[Any, None]:
        if len(options["token_ids"]) == 1:
            raise CapacityExceeded("full")
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)
        yield Chunk("ab", (1, 2))
        yield Chunk("c", (3,))
        self.running -= 1
        transfer, timings = Transfer(0, 0, 0, 0, "", ""), Timings(*[0.0] * 8)
        yield Completion("", "abc", (1, 2, 3), FinishReason.LENGTH, None, 4, 3, 2, "full", 0, transfer, timings, 0, 0, 0, ())


def caller(client: Scripted, asks: list[Ask]) -> Caller:
    return Caller(client, Visibility(boundary_tokens=1), "full", prompts(asks), 5.0, lambda text: None)


async def test_a_closed_loop_keeps_its_callers_busy_and_an_error_is_an_outcome() -> None:
    client = Scripted()
    asks, _ = plan([SimRequest(0, 1 if index == 3 else 4, 3) for index in range(9)], Fit(512))
    run = await closed_loop(caller(client, asks), asks, 3, None)
    assert client.most == 3
    assert sorted(answer.index for answer in run.answers) == list(range(9))
    assert [answer.index for answer in run.answers if answer.status == "RESOURCE_EXHAUSTED"] == [3]
    assert {(a.output_tokens, a.cached_tokens, len(a.gaps_s)) for a in run.answers if a.status == "OK"} == {(3, 2, 1)}


async def test_an_open_loop_sends_at_the_given_times_whatever_became_of_the_others() -> None:
    client = Scripted()
    asks, _ = plan([SimRequest(0.005 * index, 4, 3) for index in range(4)], Fit(512))
    run = await open_loop(caller(client, asks), asks)
    assert client.most > 1
    assert all(answer.sent_s >= asks[answer.index].arrival_s for answer in run.answers)


def test_depths_follow_the_model() -> None:
    assert visibilities_of(None, 30) == ("full", "speed:22", "pop:20")
    assert visibilities_of("full, speed:2", 6) == ("full", "speed:2")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--callers", "2", "--rate", "1/s"], "give one of them"),
        (["--rate", "0"], "more than zero"),
        (["--rate", "5 apples"], "apples"),
        (["--callers", "0"], "--callers must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--slo-ttft", "2"], "2"),
        (["--rate-scale", "2"], "give --trace"),
        (["--prompt", "0"], "more than zero"),
        (["--length-cv", "-1"], "CV"),
        (["--trace", "TRACE", "--rate", "1/s"], "--rate-scale"),
        (["--trace", "TRACE", "--turns", "2"], "--turns"),
        (["--visibilities", ","], "--visibilities is empty"),
        (["--visibilities", "deep:3"], "deep"),
        (["--trace", "TRACE"], "unknown trace format"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(flags: list[str], words: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("input_tokens,output_tokens\n5,6\n")
    result = CliRunner().invoke(command, [str(trace) if flag == "TRACE" else flag for flag in flags])
    assert result.exit_code == 2
    assert words in result.output
