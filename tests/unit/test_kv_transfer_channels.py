"""Pair channels over real Gloo in one process, and what the ordered double refuses."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import Store

from shoal.config.transfer import TransferConfig
from shoal.errors import InternalError, InvalidConfig, Unavailable
from shoal.kv_transfer.backends import make_backend
from shoal.kv_transfer.channel import PairChannel
from shoal.kv_transfer.rendezvous import StoreServer
from shoal.kv_transfer.selftest import check_gloo

Ends = tuple[PairChannel, PairChannel]  # decode, prefill


@pytest.fixture
def store() -> StoreServer:
    return StoreServer("127.0.0.1", 5.0)


@pytest.fixture
def pair(request: pytest.FixtureRequest, store: StoreServer) -> Iterator[Ends]:
    ends = make_pairs(store, request.param, 1)[0]
    yield ends
    for end in ends:
        end.close()


def make_pairs(store: StoreServer, backend: str, count: int) -> list[Ends]:
    decode, prefill = (make_backend(TransferConfig(backend=backend)) for _ in range(2))
    pairs = []
    for _ in range(count):
        prefix = store.new_prefix()
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(b.connect, store.host, store.port, prefix, r, 5.0) for r, b in enumerate((decode, prefill))]
            pairs.append((ends[0].result(), ends[1].result()))
    return pairs


def bytes_of(value: int, size: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def both(first: Callable[[], int], second: Callable[[], int]) -> tuple[int, int]:
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        return one.result(), two.result()


@pytest.mark.parametrize("pair", ["gloo", "ordered-gloo"], indirect=True)
def test_messages_match_by_order(pair: Ends) -> None:
    receiver, sender = pair
    for n, size in enumerate((1, 1 << 20, 7)):
        buffer = torch.zeros(size, dtype=torch.uint8)
        receive = receiver.post_recv(n, buffer)
        send = sender.send(n, bytes_of(n + 1, size))
        assert both(lambda: receive.wait(5.0), lambda: send.wait(5.0)) == (size, size)  # noqa: B023
        assert torch.equal(buffer, bytes_of(n + 1, size))


@pytest.mark.parametrize("pair", ["ordered-gloo"], indirect=True)
def test_the_double_refuses_a_send_before_its_receive(pair: Ends) -> None:
    with pytest.raises(InternalError, match="before its receive was posted"):
        pair[1].send(0, bytes_of(1, 8))


class _LazyStore:
    """Applies a `set` when its connection is next asked something: what a TCPStore may do on a busy machine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unwritten: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self._unwritten.append((key, value))

    def check(self, keys: list[str]) -> bool:
        while self._unwritten:
            self._store.set(*self._unwritten.pop(0))
        return self._store.check(keys)


@pytest.mark.parametrize("pair", ["ordered-gloo"], indirect=True)
def test_a_posted_receive_is_known_to_the_sender_however_slow_the_store(pair: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender = pair
    monkeypatch.setattr(receiver, "_store", _LazyStore(receiver._store))
    receive = receiver.post_recv(0, bytes_of(0, 8))
    sender.send(0, bytes_of(1, 8)).wait(5.0)
    assert receive.wait(5.0) == 8


@pytest.mark.parametrize("pair", ["ordered-gloo"], indirect=True)
@pytest.mark.parametrize(("n", "size"), [(1, 8), (0, 9), (0, 7)])
def test_the_double_refuses_another_order_or_size(pair: Ends, n: int, size: int) -> None:
    pair[0].post_recv(0, bytes_of(0, 8))
    with pytest.raises(InternalError, match="order broken"):
        pair[1].send(n, bytes_of(1, size))


def test_the_double_has_one_receive_per_worker_until_it_returns_or_is_aborted(store: StoreServer) -> None:
    (first, sender), (second, _) = make_pairs(store, "ordered-gloo", 2)
    receive = first.post_recv(0, bytes_of(0, 8))
    with pytest.raises(InternalError, match="second receive"):
        second.post_recv(0, bytes_of(0, 8))
    sender.send(0, bytes_of(1, 8)).wait(5.0)
    assert receive.wait(5.0) == 8
    second.post_recv(0, bytes_of(0, 8))
    second.abort()
    first.post_recv(1, bytes_of(0, 8))


@pytest.mark.parametrize("pair", ["gloo", "ordered-gloo"], indirect=True)
def test_a_timeout_closes_the_pair_for_good(pair: Ends) -> None:
    receiver, _ = pair
    receive = receiver.post_recv(0, bytes_of(0, 8))
    with pytest.raises(Unavailable, match="receive 0 failed"):
        receive.wait(0.05)
    with pytest.raises(Unavailable):
        receiver.post_recv(1, bytes_of(0, 8)).wait(0.05)
    receiver.close()
    with pytest.raises(Unavailable, match="closed"):
        receiver.post_recv(2, bytes_of(0, 8))


@pytest.mark.parametrize("pair", ["gloo"], indirect=True)
def test_buffers_are_checked(pair: Ends) -> None:
    for bad in (torch.zeros(0, dtype=torch.uint8), torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8)):
        for issue in (pair[0].post_recv, pair[1].send):
            with pytest.raises(ValueError, match="uint8"):
                issue(0, bad)


def test_a_pair_without_its_other_end_is_given_up(store: StoreServer) -> None:
    with pytest.raises(Unavailable, match="could not be made"):
        make_backend(TransferConfig()).connect(store.host, store.port, store.new_prefix(), 0, 0.2)


def test_pairs_leave_nothing_in_the_store(store: StoreServer) -> None:
    backend, prefix = make_backend(TransferConfig()), store.new_prefix()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: backend.connect(store.host, store.port, prefix, rank, 5.0), range(2)))
    assert any(key.startswith(prefix) for key in store._store.list_keys())
    store.forget(prefix)
    assert not any(key.startswith(prefix) for key in store._store.list_keys())


def test_backends_that_cannot_run_here_say_why() -> None:
    check_gloo("127.0.0.1")
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.1"):
        make_backend(TransferConfig(host="192.0.2.1"))
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.1.* cannot be bound"):
        StoreServer("192.0.2.1", 1.0)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfig, match="choose 'gloo' on CPU"):
            make_backend(TransferConfig(backend="nccl"))
