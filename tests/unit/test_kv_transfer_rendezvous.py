"""The two ends' stores: what crosses, what is refused, who waits how long."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.config.transfer import TransferConfig
from shoal.errors import InternalError, Unavailable
from shoal.kv_transfer.backends import make_backend
from shoal.kv_transfer.rendezvous import MAX_KEYS, MAX_VALUE_BYTES, PairStore, twin_stores


def test_what_one_end_sets_both_have_until_each_forgets_it() -> None:
    first, second = twin_stores(1.0)
    first.set("0/0", b"\x00here")
    assert first.get("0/0") == second.get("0/0") == b"\x00here"
    assert second.delete_key("0/0") and not second.delete_key("0/0")
    assert first.check(["0/0"]) and not second.check(["0/0"])


def test_a_pair_without_its_other_end_is_given_up_after_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"within 0\.2 s"):
        make_backend(TransferConfig()).connect(PairStore(lambda key, value: None, 0.2), 0, 0.2)
    assert 0.15 < time.monotonic() - began < 2


def test_a_pair_that_closes_while_its_ends_meet_wakes_both_at_once() -> None:
    alone = [PairStore(lambda key, value: None, 30.0) for _ in range(2)]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(make_backend(TransferConfig()).connect, store, rank, 30.0) for rank, store in enumerate(alone)]
        for store in alone:
            store.close(Unavailable("the peer has gone"))
        for end in ends:
            with pytest.raises(Unavailable, match="the peer has gone"):
                end.result()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("key", "value"), [("", b"1"), ("k" * 257, b"1"), ("k", b""), ("k", bytes(MAX_VALUE_BYTES + 1))])
def test_what_no_group_sets_is_refused(key: str, value: bytes) -> None:
    """An empty value would crash Gloo, and the process with it."""
    with pytest.raises(InternalError, match="cannot be right"):
        PairStore(lambda key, value: None, 1.0).heard(key, value)


def test_a_peer_cannot_fill_the_memory() -> None:
    store = PairStore(lambda key, value: None, 1.0)
    for i in range(MAX_KEYS):
        store.heard(f"k{i}", b"1")
    store.heard("k0", b"2")
    with pytest.raises(InternalError, match="more than 64 keys"):
        store.heard("one more", b"1")


@pytest.mark.parametrize("damaged", [b"\x00", b"short", bytes(170), b"\xff" * 170, bytes(171)])
def test_a_damaged_address_fails_the_pair_and_not_the_process(damaged: bytes) -> None:
    store = PairStore(lambda key, value: store.heard("0/1", damaged), 0.5)
    with pytest.raises(Unavailable, match="could not be made"):
        make_backend(TransferConfig()).connect(store, 0, 0.5)


def test_a_stranger_on_the_channel_is_sent_nothing() -> None:
    """It answers in the peer's place, but has not heard what went through the control stream."""
    ours, strangers = twin_stores(5.0)
    heard = strangers.heard
    strangers.heard = lambda key, value: heard(key, b"0123456789abcdef" if key == "proof/1" else value)  # type: ignore[method-assign]
    backend = make_backend(TransferConfig())
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(backend.connect, store, rank, 5.0) for rank, store in enumerate((strangers, ours))]
        with pytest.raises(Unavailable, match="somebody else has answered"):
            ends[0].result()
        ends[1].result().close()
