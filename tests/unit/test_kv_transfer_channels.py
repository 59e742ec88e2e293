"""Pair channels over real Gloo in one process, and what the ordered double refuses."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.config.transfer import TransferConfig
from shoal.errors import InternalError, InvalidConfig, Unavailable
from shoal.kv_transfer.backends import make_backend
from shoal.kv_transfer.channel import PairChannel
from shoal.kv_transfer.rendezvous import twin_stores
from shoal.kv_transfer.selftest import check_gloo

Ends = tuple[PairChannel, PairChannel]  # decode, prefill


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = make_pairs(request.param, 1)[0]
    yield ends
    for end in ends:
        end.close()


def make_pairs(backend: str, count: int) -> list[Ends]:
    backends = [make_backend(TransferConfig(backend=backend)) for _ in range(2)]
    pairs = []
    for _ in range(count):
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(backends[rank].connect, store, rank, 5.0) for rank, store in enumerate(twin_stores(5.0))]
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


@pytest.mark.parametrize("pair", ["ordered-gloo"], indirect=True)
@pytest.mark.parametrize(("n", "size"), [(1, 8), (0, 9), (0, 7)])
def test_the_double_refuses_another_order_or_size(pair: Ends, n: int, size: int) -> None:
    pair[0].post_recv(0, bytes_of(0, 8))
    with pytest.raises(InternalError, match="order broken"):
        pair[1].send(n, bytes_of(1, size))


def test_the_double_has_one_receive_per_worker_until_it_returns_or_is_aborted() -> None:
    (first, sender), (second, _) = make_pairs("ordered-gloo", 2)
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


def test_backends_that_cannot_run_here_say_why() -> None:
    check_gloo("127.0.0.1")
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.1"):
        make_backend(TransferConfig(host="192.0.2.1"))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfig, match="choose 'gloo' on CPU"):
            make_backend(TransferConfig(backend="nccl"))
