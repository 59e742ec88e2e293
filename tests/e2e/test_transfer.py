"""Two processes, a wire: bytes to the byte and against the kernel's count, overlap, refusals, fairness."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.e2e.transfer_lab import Lab, PeerFailed, running_lab, transfer

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_bytes_equal_the_plan_and_the_kernels_count(lab: Lab, backend: str) -> None:
    async with lab.peer("decode", "d0", backend=backend) as decode, lab.peer("prefill", "p0", backend=backend) as prefill:
        await transfer(prefill, decode, "warm", tokens=100)
        before = [await peer.call("tcp") for peer in (prefill, decode)]
        sent, received = await transfer(prefill, decode, "measured", tokens=8000)
        after = [await peer.call("tcp") for peer in (prefill, decode)]
        assert sent["payload_bytes"] == received["payload_bytes"] == sent["plan_bytes"] > 60e6
        assert received["num"] == 64
        assert 0 < sent["header_bytes"] < 0.001 * sent["payload_bytes"] and sent["header_bytes"] == received["header_bytes"]
        on_wire = [after[0]["sent"] - before[0]["sent"], after[1]["received"] - before[1]["received"]]
        for counted in on_wire:
            assert abs(counted - sent["payload_bytes"]) < 0.02 * sent["payload_bytes"], (counted, sent)
        await prefill.settled(1.0)
        await decode.settled(1.0)


async def test_layers_cross_while_the_last_one_is_still_computed(lab: Lab) -> None:
    async with lab.peer("decode", "d0") as decode, lab.peer("prefill", "p0") as prefill:
        await transfer(prefill, decode, "warm", tokens=100)
        expected = await decode.call("expect", attempt="late", seed=1, tokens=2048)
        receiving = decode.call("receive", attempt="late")
        started = time.monotonic()
        sending = prefill.call("send", target=decode.target, attempt="late", seed=1, tokens=2048, late_s=1.0)
        per_layer = expected["num_entries"] // 8
        while (unpacked := (await decode.call("unpacked", attempt="late"))["num"]) < 7 * per_layer:
            assert time.monotonic() - started < 0.9, f"only {unpacked} of {7 * per_layer} early entries have arrived"
            await asyncio.sleep(0.02)
        assert not sending.done() and not receiving.done()
        await asyncio.sleep(0.1)
        assert (await decode.call("unpacked", attempt="late"))["num"] == 7 * per_layer, "the last layer cannot have arrived"
        assert (await sending)["payload_bytes"] == (await receiving)["payload_bytes"] == expected["plan_bytes"]
        assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("revision", "r2", "revision: r2 != r1"),
        ("dtype", "float32", "dtype: float32 != bfloat16"),
        ("block_size", 32, "block_size: 32 != 16"),
        ("rope", "theta=5e5", "rope: theta=5e5 != theta=1e4"),
    ],
)
async def test_workers_that_differ_are_refused_with_words(lab: Lab, field: str, value: object, words: str) -> None:
    async with lab.peer("decode", "d0") as decode, lab.peer("prefill", "p0", fingerprint={field: value}) as prefill:
        await decode.call("expect", attempt="a", seed=1, tokens=64)
        with pytest.raises(PeerFailed) as refused:
            await prefill.call("send", target=decode.target, attempt="a", seed=1, tokens=64)
        assert refused.value.kind == "Mismatch" and words in refused.value.words, refused.value
        with pytest.raises(PeerFailed, match=words):  # refused at pairing already, before any attempt
            await prefill.call("prewarm", target=decode.target)


async def test_attempts_and_pairs_that_do_not_fit_are_refused_with_words(lab: Lab) -> None:
    async with lab.peer("decode", "d0", epoch=7) as decode, lab.peer("prefill", "p0") as prefill:

        async def refused(kind: str, *words: str, attempt: str = "a", target: list | None = None, **changes: object) -> None:
            arguments = {"target": target or decode.target, "attempt": attempt, "seed": 1, "tokens": 64, **changes}
            with pytest.raises(PeerFailed) as caught:
                await prefill.call("send", **arguments)
            assert caught.value.kind == kind and all(word in caught.value.words for word in words), caught.value

        await decode.call("expect", attempt="a", seed=1, tokens=64)
        await refused("Mismatch", "visibility: speed:4:boundary=1 != full:boundary=1", "plan_digest", visibility="speed:4")
        await refused("Mismatch", "num_prompt_tokens: 65 != 64", tokens=65)
        await refused("Unavailable", "no reservation", attempt="b")
        await refused("Unavailable", "stale", target=[decode.target[0], "d0", 6])
        await refused("Unavailable", "stale", target=[decode.target[0], "d1", 7])
        sent, _ = await asyncio.gather(
            prefill.call("send", target=decode.target, attempt="a", seed=1, tokens=64), decode.call("receive", attempt="a")
        )
        assert sent["payload_bytes"] == sent["plan_bytes"], "refusals must leave the reservation and its pair as they were"
        await refused("Cancelled", "has ended")
        async with lab.peer("prefill", "p1", backend="ordered-gloo") as other:
            with pytest.raises(PeerFailed, match="backend: ordered-gloo at prefill != gloo at decode"):
                await other.call("send", target=decode.target, attempt="c", seed=1, tokens=64)
        with pytest.raises(PeerFailed, match="AlreadyExists"):
            await decode.call("expect", attempt="a", seed=1, tokens=64)


async def test_a_task_with_a_false_epoch_does_not_end_the_good_pair(lab: Lab) -> None:
    async with lab.peer("decode", "d0", epoch=7) as decode, lab.peer("prefill", "p0") as prefill:
        await transfer(prefill, decode, "warm", tokens=64)
        await decode.call("expect", attempt="a", seed=1, tokens=64)
        receiving = decode.call("receive", attempt="a")
        sending = prefill.call("send", target=decode.target, attempt="a", seed=1, tokens=64, late_s=0.5)
        with pytest.raises(PeerFailed, match="stale"):
            await prefill.call("send", target=[decode.target[0], "d0", 8], attempt="b", seed=1, tokens=64)
        assert (await sending)["payload_bytes"] == (await receiving)["payload_bytes"] > 0


async def test_a_restarted_prefill_worker_replaces_its_old_self(lab: Lab) -> None:
    async with lab.peer("decode", "d0") as decode, lab.peer("prefill", "p0", epoch=2) as new:
        await transfer(new, decode, "a1", tokens=64)
        async with lab.peer("prefill", "p0", epoch=1) as old:
            await decode.call("expect", attempt="a2", seed=1, tokens=64)
            with pytest.raises(PeerFailed, match="replaced by epoch 2"):
                await old.call("send", target=decode.target, attempt="a2", seed=1, tokens=64)
        await transfer(new, decode, "a3", tokens=64)


async def test_everything_listens_on_the_named_interface_only(lab: Lab) -> None:
    async with lab.peer("decode", "d0", host="127.0.0.2") as decode, lab.peer("prefill", "p0", host="127.0.0.3") as prefill:
        await transfer(prefill, decode, "a", tokens=64)
        assert (await decode.call("listening"))["hosts"] == ["127.0.0.1", "127.0.0.2"], "the peer's gRPC server is on .1"
        assert (await prefill.call("listening"))["hosts"] == ["127.0.0.3"]
    with pytest.raises(PeerFailed, match=r"InvalidConfig: transfer.host '192.0.2.1'"):
        async with lab.peer("decode", "d0", host="192.0.2.1"):
            pass


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo"])
async def test_two_senders_and_two_receivers_in_opposite_orders(lab: Lab, backend: str) -> None:
    """200 transfers; each sender starts with another receiver. On the ordered double each worker has one receive slot."""
    options = {"backend": backend, "num_staging_buffers": 3}
    async with (
        lab.peer("decode", "d0", **options) as d0,
        lab.peer("decode", "d1", **options) as d1,
        lab.peer("prefill", "p0", **options) as p0,
        lab.peer("prefill", "p1", **options) as p1,
    ):

        async def worker(prefill, orders, name) -> int:
            num_bytes = 0
            for i in range(25):
                pairs = [transfer(prefill, decode, f"{name}-{i}-{j}", tokens=200) for j, decode in enumerate(orders)]
                for sent, received in await asyncio.gather(*pairs):
                    assert sent["payload_bytes"] == received["payload_bytes"] == sent["plan_bytes"] and not received["wrong"]
                    num_bytes += sent["payload_bytes"]
            return num_bytes

        lanes = [worker(p0, [d0, d1], "a"), worker(p0, [d1, d0], "b"), worker(p1, [d1, d0], "c"), worker(p1, [d0, d1], "d")]
        async with asyncio.timeout(60):
            totals = await asyncio.gather(*lanes)
        assert len(set(totals)) == 1 and totals[0] > 0
        for peer in (d0, d1, p0, p1):
            await peer.settled(1.0)
