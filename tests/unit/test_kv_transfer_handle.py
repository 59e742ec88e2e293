"""The handle survives its round trip, and nothing else gets in."""

import dataclasses

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidRequest, Mismatch, ShoalError
from shoal.kv_transfer import wire
from shoal.kv_transfer.handle import Handle
from shoal.rpc.fingerprints import fingerprint_from_pb, fingerprint_to_pb
from shoal.types import DType
from tests.fakes.transfer import FINGERPRINT, toy_handle, toy_plan

HANDLE = toy_handle("attempt-1", toy_plan(4, 8))


def parts() -> list:
    return msgpack.unpackb(HANDLE.encode())


def test_round_trip() -> None:
    assert Handle.decode(HANDLE.encode()) == HANDLE
    bfloat16 = dataclasses.replace(HANDLE, fingerprint=dataclasses.replace(FINGERPRINT, dtype=DType.BFLOAT16))
    assert Handle.decode(bfloat16.encode()).fingerprint.dtype is DType.BFLOAT16
    assert fingerprint_from_pb(fingerprint_to_pb(FINGERPRINT)) == FINGERPRINT


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(ShoalError):
        Handle.decode(data)


@settings(max_examples=200)
@given(st.data())
def test_damaged_handles_are_refused_or_read_as_handles(data: st.DataObject) -> None:
    packed = bytearray(HANDLE.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        handle = Handle.decode(bytes(packed[: data.draw(st.integers(0, len(packed)))]))
    except ShoalError:
        return
    assert all(type(getattr(handle, f.name)) is type(getattr(HANDLE, f.name)) for f in dataclasses.fields(Handle))


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ((1, 2), "9", "num_prompt_tokens must be int, not str"),
        ((1, 2), True, "num_prompt_tokens must be int, not bool"),
        ((1, 2), -1, "num_prompt_tokens is out of range"),
        ((1, 3), 1 << 41, "num_cached_tokens is out of range"),
        ((1, 0), 7, "attempt_id must be str, not int"),
        ((1, 1), "x" * 2000, "not valid msgpack"),
        ((2,), [], "0 fields where 11 belong"),
        ((1,), None, "must hold its version"),
        ((2, 6), "float8", "dtype 'float8' is unknown"),
        ((0,), 2, "version 2"),
    ],
)
def test_every_field_is_checked(where: tuple[int, ...], value: object, words: str) -> None:
    broken = parts()
    inner = broken
    for index in where[:-1]:
        inner = inner[index]
    inner[where[-1]] = value
    with pytest.raises((InvalidRequest, Mismatch), match=words):
        Handle.decode(msgpack.packb(broken))


def test_oversized_handles_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        Handle.decode(b"\x90" * (1 << 20))


def test_differences_are_named_all_at_once() -> None:
    theirs = dataclasses.replace(FINGERPRINT, revision="r2", block_size=32)
    other = dataclasses.replace(HANDLE, fingerprint=theirs, visibility="speed:2:boundary=1")
    with pytest.raises(Mismatch) as caught:
        HANDLE.check_against(other)
    for words in ("revision: r1 != r2", "block_size: 16 != 32", "visibility: full:boundary=1 != speed:2:boundary=1"):
        assert words in str(caught.value)
    with pytest.raises(Mismatch, match="revision: r1 != r2; block_size: 16 != 32"):
        wire.check_fingerprints(FINGERPRINT, theirs)


def test_errors_keep_their_class_over_the_wire() -> None:
    for error in (Mismatch("a"), InvalidRequest("b")):
        back = wire.rejected(wire.rejection("x", error).reject)
        assert type(back) is type(error) and str(back) == str(error)
    message = wire.rejection("x", Mismatch("a"))
    message.reject.code = "os.system"
    assert type(wire.rejected(message.reject)).__name__ == "Unavailable"
