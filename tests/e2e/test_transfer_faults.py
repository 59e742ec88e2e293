"""Two processes, and one of them dies, hangs, lies or changes its mind: the other answers in time and keeps nothing."""

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.transfer_lab import Lab, PeerFailed, PeerProcess, running_lab, transfer

pytestmark = pytest.mark.e2e

# 4 MiB messages: more than the loopback's socket buffers hold, so a kill can tear one
BIG: dict[str, Any] = {"max_entry_bytes": 4 << 20, "max_entry_tokens": 4096}
TOKENS = 8000  # 16 messages, 62 MiB
TORN_S = 0.8 + (4 << 20) / 16e6  # the byte-sized timeout of one message
SLACK_S = 2.0  # for two busy cores

PREFILL_POINTS = {
    "on-accept": 0, "before-pack": 3, "after-pack": 3, "before-ready": 3, "after-ready": 3, "on-go": 3, "before-send": 3,
    "mid-send": 3, "after-send": 3, "before-trailer": 0,
}  # fmt: skip
DECODE_POINTS = {
    "on-hello": 0, "before-welcome": 0, "on-open": 0, "after-accept": 0, "on-ready": 3, "before-post": 3, "after-post": 3,
    "after-go": 3, "after-receive": 3, "after-unpack": 3, "before-ack": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


async def fails(call: "asyncio.Future[Any]", *kinds: str) -> PeerFailed:
    with pytest.raises(PeerFailed) as caught:
        await call
    assert caught.value.kind in kinds, caught.value
    return caught.value


def kill_at(point: str, skip: int) -> dict[str, Any]:
    return {point: {"action": "kill", "skip": skip}}


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_prefill_killed_at_ten_points(lab: Lab, backend: str) -> None:
    async with lab.peer("decode", "d0", backend=backend, **BIG) as decode:
        for epoch, (point, skip) in enumerate(PREFILL_POINTS.items()):
            attempt = f"victim-{point}"
            await decode.call("expect", attempt=attempt, seed=1, tokens=TOKENS)
            receiving = decode.call("receive", attempt=attempt)
            faults = kill_at(point, skip)
            async with lab.peer("prefill", "p0", 2 * epoch, backend=backend, faults=faults, **BIG) as victim:
                sending = victim.call("send", target=decode.target, attempt=attempt, seed=1, tokens=TOKENS)
                error = await fails(receiving, "Unavailable")
                failed_s = time.monotonic()
                assert failed_s - await victim.death() < 2.0, f"{point}: {error}"
                with pytest.raises(ConnectionError):
                    await sending
            async with lab.peer("prefill", "p0", 2 * epoch + 1, backend=backend, **BIG) as next_one:
                sent, received = await transfer(next_one, decode, f"next-{point}", tokens=TOKENS)
                assert received["payload_bytes"] == sent["plan_bytes"] and not received["wrong"], point
                await decode.settled(TORN_S + SLACK_S, why=point)


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_decode_killed_at_eleven_points(lab: Lab, backend: str) -> None:
    async with lab.peer("prefill", "p0", backend=backend, **BIG) as prefill:
        for epoch, (point, skip) in enumerate(DECODE_POINTS.items()):
            async with lab.peer("decode", "d0", 2 * epoch, backend=backend, faults=kill_at(point, skip), **BIG) as victim:
                await victim.call("expect", attempt=f"victim-{point}", seed=1, tokens=TOKENS)
                sending = prefill.call("send", target=victim.target, attempt=f"victim-{point}", seed=1, tokens=TOKENS)
                error = await fails(sending, "Unavailable")
                failed_s = time.monotonic()
                assert failed_s - await victim.death() < 2.0, f"{point}: {error}"
            async with lab.peer("decode", "d0", 2 * epoch + 1, backend=backend, **BIG) as next_one:
                sent, received = await transfer(prefill, next_one, f"next-{point}", tokens=TOKENS)
                assert received["payload_bytes"] == sent["plan_bytes"] and not received["wrong"], point
                await prefill.settled(TORN_S + SLACK_S, why=point)


HUNG_TOKENS = 44_000  # messages of 43 MiB: more than the kernel's socket buffers take when nobody reads
HUNG: dict[str, Any] = {"max_entry_bytes": 48 << 20, "max_entry_tokens": 1 << 16, "base_timeout_s": 5.0}
HUNG_S = 5.0 + (48 << 20) / 16e6


async def hang_and_go_on(prefill: PeerProcess, decode: PeerProcess, hung: PeerProcess, other: PeerProcess) -> None:
    """`hung` stops itself with a message on the channel. The survivor finds out by its heartbeat, serves another peer at once
    although the buffer is still quarantined (on the ordered double: although its one place was taken), and gets it back."""
    survivor = prefill if hung is decode else decode
    await decode.call("expect", attempt="hung", seed=1, tokens=HUNG_TOKENS)
    ends = (
        decode.call("receive", attempt="hung"),
        prefill.call("send", target=decode.target, attempt="hung", seed=1, tokens=HUNG_TOKENS),
    )
    try:
        error = await fails(ends[0] if survivor is decode else ends[1], "Unavailable")
        silent = re.search(r"silent for ([0-9.]+) s", error.words)
        assert silent is not None and float(silent[1]) < 4 * 0.25 + SLACK_S, error
        state = await survivor.call("state")
        assert state["expected"] == 0 and state["in_use"] == state["quarantined"] > 0, state
        await (transfer(prefill, other, "other") if survivor is prefill else transfer(other, decode, "other"))
        assert (await survivor.call("state"))["quarantined"] > 0, "the buffer came back before its receive or send returned"
        await survivor.settled(HUNG_S + SLACK_S)
    finally:
        hung.signal(signal.SIGCONT)
        for call in ends:
            await asyncio.wait([call])
            call.exception()
    await (transfer(prefill, other, "last") if survivor is prefill else transfer(other, decode, "last"))


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_a_hung_prefill_worker_is_found_and_its_staging_returns(lab: Lab, backend: str) -> None:
    stop = {"before-send": {"action": "stop", "skip": 2}}
    async with (
        lab.peer("decode", "d0", backend=backend, **HUNG) as decode,
        lab.peer("prefill", "p0", backend=backend, faults=stop, **HUNG) as hung,
        lab.peer("prefill", "p1", backend=backend, **HUNG) as other,
    ):
        await hang_and_go_on(hung, decode, hung, other)


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_a_hung_decode_worker_is_found_and_its_staging_returns(lab: Lab, backend: str) -> None:
    stop = {"after-go": {"action": "stop", "skip": 2}}
    async with (
        lab.peer("prefill", "p0", backend=backend, **HUNG) as prefill,
        lab.peer("decode", "d0", backend=backend, faults=stop, **HUNG) as hung,
        lab.peer("decode", "d1", backend=backend, **HUNG) as other,
    ):
        await hang_and_go_on(prefill, hung, hung, other)


async def test_quarantine_lasts_until_the_posted_receive_returns(lab: Lab) -> None:
    """Prefill takes the Go and never sends, but its control stream lives: the cancel frees blocks, not the posted buffer."""
    hang = {"before-send": {"action": "delay", "delay_s": 1.0, "times": 1}}
    async with lab.peer("decode", "d0", base_timeout_s=5.0) as decode, lab.peer("prefill", "p0", faults=hang) as prefill:
        await decode.call("expect", attempt="a", seed=1, tokens=1024)
        receiving = decode.call("receive", attempt="a")
        sending = prefill.call("send", target=decode.target, attempt="a", seed=1, tokens=1024)
        await decode.settled(5.0, in_use=4, expected=1)
        await decode.call("cancel", attempt="a")
        state = await decode.call("state")
        assert (state["expected"], state["in_use"], state["quarantined"]) == (0, 4, 4)
        await fails(receiving, "Cancelled")
        await fails(sending, "Cancelled")
        await decode.settled(3.0, pairs=1)
        await prefill.settled(3.0, pairs=1)
        await transfer(prefill, decode, "the pair lives on")


async def test_damaged_bytes_fail_the_transfer(lab: Lab) -> None:
    damage = {"before-send": {"action": "corrupt", "skip": 2}}
    async with lab.peer("decode", "d0") as decode, lab.peer("prefill", "p0", faults=damage) as prefill:
        await decode.call("expect", attempt="a", seed=1, tokens=1024)
        receiving = decode.call("receive", attempt="a")
        error = await fails(prefill.call("send", target=decode.target, attempt="a", seed=1, tokens=1024), "Unavailable")
        assert "checksum" in error.words
        await fails(receiving, "ChecksumMismatch")
        await transfer(prefill, decode, "b")


async def test_leases_run_out_on_idle_workers(lab: Lab) -> None:
    """A reservation that nobody opens, an Accept and an Ack that never come; nothing else happens on either worker."""
    for message, words in (("accept", "no Accept"), ("ack", "no Ack")):
        lost = {f"before-{message}": {"action": "drop"}}
        async with (
            lab.peer("decode", "d0", faults=lost, lease_s=0.5) as decode,
            lab.peer("prefill", "p0", lease_s=0.5) as prefill,
        ):
            await decode.call("expect", attempt="nobody", seed=1, tokens=64)
            await decode.call("expect", attempt="a", seed=1, tokens=64)
            sending = prefill.call("send", target=decode.target, attempt="a", seed=1, tokens=64)
            assert words in (await fails(sending, "Unavailable")).words
            assert "no prefill worker opened" in (await fails(decode.call("receive", attempt="nobody"), "Unavailable")).words
            await decode.settled(2.0)
            await prefill.settled(2.0)


async def test_idle_pairs_are_evicted_and_made_again(lab: Lab) -> None:
    async with (
        lab.peer("decode", "d0") as d0,
        lab.peer("decode", "d1") as d1,
        lab.peer("prefill", "p0", max_pairs=1, pair_idle_s=1.0) as prefill,
    ):
        for i in range(2):
            for decode in (d0, d1):
                await transfer(prefill, decode, f"{i}", tokens=64)
                assert (await prefill.call("state"))["pairs"] == 1
        await prefill.settled(5.0, pairs=0)
        await d0.settled(5.0, pairs=0)
        await transfer(prefill, d0, "again", tokens=64)


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_a_hundred_cancels_at_swept_delays(lab: Lab, backend: str) -> None:
    options = {"backend": backend, "max_entry_bytes": 256 << 10, "max_entry_tokens": 256}
    async with lab.peer("decode", "d0", **options) as decode, lab.peer("prefill", "p0", **options) as prefill:
        await transfer(prefill, decode, "warm")
        outcomes: dict[str, int] = {}

        async def cancelled(i: int) -> None:
            attempt, delay_s = f"cancelled-{i}", i // 2 * 0.001
            await decode.call("expect", attempt=attempt, seed=i, tokens=2048)
            receiving = decode.call("receive", attempt=attempt)
            at_sender = {"cancel_s": delay_s} if i % 2 else {}
            sending = prefill.call("send", target=decode.target, attempt=attempt, seed=i, tokens=2048, **at_sender)
            if not at_sender:
                await decode.call("cancel", attempt=attempt, after_s=delay_s)
            results = await asyncio.gather(sending, receiving, return_exceptions=True)
            for result in results:
                assert isinstance(result, dict) or result.kind in ("Cancelled", "Unavailable", "CancelledError"), result
                outcomes[type(result).__name__] = outcomes.get(type(result).__name__, 0) + 1
            if isinstance(results[1], PeerFailed) and "no prefill worker" not in results[1].words:
                return
            await decode.call("cancel", attempt=attempt)

        for i in range(0, 100, 4):
            bystander = transfer(prefill, decode, f"bystander-{i}", tokens=300)
            *_, (sent, received) = await asyncio.gather(*(cancelled(j) for j in range(i, i + 4)), bystander)
            assert received["payload_bytes"] == sent["plan_bytes"] and not received["wrong"]
        assert outcomes["PeerFailed"] > 50, f"too few of the cancels hit a running transfer: {outcomes}"
        state = await decode.settled(2.0, pairs=1)
        await prefill.settled(2.0, pairs=1)
        assert state["wrong_entries"] == 0
