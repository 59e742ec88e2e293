"""Staging, gates, guard, faults, settings: the small parts on their own."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.transfer import TransferConfig
from shoal.errors import InternalError, InvalidConfig, ShoalError, Unavailable
from shoal.kv_transfer.checksum import checksum
from shoal.kv_transfer.control import ControlStream, receiver_beat
from shoal.kv_transfer.faults import Fault, Faults
from shoal.kv_transfer.guard import Guard
from shoal.kv_transfer.staging import Gate, Permits, StagingBuffer, StagingPool
from shoal.pb.internal.v1 import transfer_pb2 as pb

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.sampled_from(["request", "withdraw", "release", "quarantine"]), st.integers(0, 4)), max_size=60))
def test_staging_is_bounded_and_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    pool = StagingPool(3, 16, CPU, "test")
    held: list[StagingBuffer] = []
    memories: set[int] = set()
    for step, key in steps:
        if step == "request":
            pool.request(key, held.append)
        elif step == "withdraw":
            pool.withdraw(key)
        elif step == "quarantine" and held:
            pool.quarantine(held[0])
        elif step == "release" and held:
            pool.release(held.pop(0))
        assert pool.num_in_use == len(held) <= 3 and len(set(map(id, held))) == len(held)
        assert pool.num_quarantined == sum(buffer.quarantined for buffer in held)
        memories |= {buffer.memory.data_ptr() for buffer in held}
    assert len(memories) <= 3, "buffers are reused, never made anew"
    while held:
        pool.release(held.pop())
    assert pool.num_in_use == 0


def test_a_buffer_returns_once_and_holds_only_what_fits() -> None:
    pool, held = StagingPool(1, 16, CPU, "test"), []
    pool.request("a", held.append)
    assert held[0].view(16).numel() == 16
    for num_bytes in (0, 17):
        with pytest.raises(InternalError):
            held[0].view(num_bytes)
    pool.release(held[0])
    with pytest.raises(InternalError, match="twice"):
        pool.release(held[0])


async def test_a_peer_that_writes_but_does_not_read_is_given_up() -> None:
    errors: list[ShoalError] = []
    stuck = asyncio.Event()
    stream = ControlStream[pb.ReceiverMessage](
        end="received",
        write=lambda message: stuck.wait(),
        faults=Faults(),
        heartbeat_s=60.0,
        peer_timeout_s=180.0,
        beat=receiver_beat,
        on_tick=lambda now: None,
        on_silent=errors.append,
    )
    await asyncio.sleep(0)
    for n in range(10_000):
        stream.put(pb.ReceiverMessage(skip=pb.Skip(n=n)))
    stream.stop()
    assert [str(error) for error in errors] == ["the peer has not read 4096 control messages; its pair is closed"]


def test_a_gate_serves_pairs_in_turn() -> None:
    gate, order = Gate(1), []
    gate.request("x", lambda: order.append("x"))
    for key in ("a", "b", "a", "c"):  # asking again does not move a pair
        gate.request(key, lambda key=key: order.append(key))
    gate.withdraw("b")
    for _ in range(2):
        gate.release()
    gate.request("a", lambda: order.append("a"))
    gate.release()
    assert order == ["x", "a", "c", "a"]
    gate.release()
    with pytest.raises(InternalError):
        gate.release()


def test_a_withdrawn_permit_gives_its_place_back() -> None:
    pool, held = StagingPool(1, 16, CPU, "test"), []
    gate = Gate(1)
    permits = Permits(gate, pool)
    pool.request("somebody", held.append)
    permits.request("a", held.append)
    assert gate.num_held == 1 and len(held) == 1, "a has its place and waits for the buffer"
    permits.withdraw("a")
    assert gate.num_held == 0
    permits.request("b", held.append)
    permits.release_buffer(held[0])
    assert len(held) == 2 and gate.num_held == 1


def test_a_closed_guard_waits_for_the_call_in_progress() -> None:
    guard, inside, go, seen = Guard(), threading.Event(), threading.Event(), []

    def slow() -> None:
        inside.set()
        go.wait(5)
        seen.append("copied")

    caller = threading.Thread(target=lambda: guard.call(slow))
    caller.start()
    assert inside.wait(5)
    closer = threading.Thread(target=lambda: (guard.close(), seen.append("closed")))
    closer.start()
    go.set()
    caller.join(5)
    closer.join(5)
    assert seen == ["copied", "closed"]
    assert guard.call(lambda: seen.append("late")) is False and len(seen) == 2


def test_a_failing_copy_is_our_bug_and_says_so() -> None:
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        Guard().call(lambda: 1 // 0)


def test_faults_hit_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults({"a": Fault("drop", skip=1, times=2), "b": Fault("raise")})
    assert [faults.hit("a") for _ in range(5)] == [False, True, True, False, False]
    often = Faults({"d": Fault("drop", skip=1, every=3, times=2)})
    assert [at for at in range(12) if often.hit("d")] == [1, 4]
    assert not Faults().hit("a") and not faults.hit("c")
    with pytest.raises(Unavailable, match="fault injected at b"):
        faults.hit("b")
    monkeypatch.setenv("SHOAL_FAULTS", '{"x": {"action": "drop"}}')
    assert Faults.from_environment(allowed=True).hit("x")
    with pytest.raises(InvalidConfig, match="fault injection is off"):
        Faults.from_environment(allowed=False)
    for text in ("{", '{"x": {"action": "explode"}}', '{"x": {"nonsense": 1}}', "[1]"):
        monkeypatch.setenv("SHOAL_FAULTS", text)
        with pytest.raises(InvalidConfig):
            Faults.from_environment(allowed=True)
    monkeypatch.delenv("SHOAL_FAULTS")
    assert not Faults.from_environment(allowed=False).hit("x")


@pytest.mark.parametrize("bad", [{"backend": "ucx"}, {"num_staging_buffers": 0}, {"heartbeat_s": 0.0}, {"lease_s": float("nan")}])
def test_settings_that_cannot_work_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(bad)) if "backend" not in bad else "gloo, nccl"):
        TransferConfig(**bad)


def test_timeouts_follow_the_bytes() -> None:
    config = TransferConfig(base_timeout_s=2.0, min_rate_bytes_per_s=1e6)
    assert config.message_timeout_s(3_000_000) == pytest.approx(5.0)
    assert TransferConfig(heartbeat_s=0.5, heartbeat_misses=4).peer_timeout_s == 2.0


@given(st.integers(1, 5 * 8192 + 99), st.integers(0, 99))
def test_both_ends_sum_alike_with_and_without_kernels(num_bytes: int, seed: int) -> None:
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.kv_transfer.checksum.kernels_or_none", lambda: None)
        plain = checksum(data)
    assert checksum(data) == plain


def test_the_checksum_sees_every_byte_and_every_order() -> None:
    for num_bytes in (1, 100, 8192, 8192 * 3 + 24):
        data = torch.from_numpy(np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8))
        right, seen = checksum(data), set()
        for at in {0, num_bytes // 2, num_bytes - 1, min(num_bytes - 1, 8191)}:
            damaged = data.clone()
            damaged[at] ^= 1
            seen.add(checksum(damaged))
        assert right not in seen and checksum(data.clone()) == right
    rows = data[: 8192 * 3].clone().view(3, -1)
    whole = checksum(rows.view(-1))
    assert len({whole, checksum(rows[[1, 0, 2]].view(-1)), checksum(rows.roll(8, 1).reshape(-1))}) == 3
