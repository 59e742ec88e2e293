"""A GGUF file's header: metadata and tensor table, checked against the file's size. Knows no model and reads no weights.

The `gguf` package's reader makes several numpy objects per array element and takes seconds on a vocabulary; this one takes
tens of milliseconds. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from shoal.errors import InvalidConfig
from shoal.model_files.tensors import TensorInfo

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[Scalar]

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value type → struct code
_MAX_RANK = 4
_MAX_ITEMS = 1 << 22  # of a metadata array: several vocabularies' worth, and bounds what a damaged length makes us allocate
# GGML type → (name, elements per block, bytes per block): those that the gguf package dequantises exactly.
_ENCODINGS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}


class _Ended(Exception):
    """The header runs past the end of the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensor table of one file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    def text(self, key: str) -> str | None:
        """A string, or None when the key is absent. Raises InvalidConfig, here and below without the path, when it is not one."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise InvalidConfig(f"{key} should be a string")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Raises InvalidConfig when it is absent (and has no default) or not one number for all layers."""
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            state = "absent" if value is None else "not one number for the whole model, which is not supported"
            raise InvalidConfig(f"{key} is {state}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """The same for a whole number."""
        return int(self.number(key, default))

    def texts(self, key: str) -> list[str]:
        """An array of strings. Raises InvalidConfig when it is absent or something else."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidConfig(f"{key} is absent or not an array of strings")
        return [str(item) for item in value]


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header. Raises InvalidConfig when it is missing, cut short, or not such a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise InvalidConfig(f"{path} is not a GGUF file ({size} bytes)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data, size)
    except _Ended:
        raise InvalidConfig(f"{path} is cut short within its header ({size} bytes); fetch the file again") from None
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, KeyError, OverflowError) as error:
        words = error.reason if isinstance(error, UnicodeDecodeError) else repr(error)  # the former's repr holds all its bytes
        raise InvalidConfig(f"{path} has a damaged header ({words}); fetch the file again") from None


def _parse(path: Path, data: mmap.mmap, size: int) -> GgufFile:
    if data[:4] != _MAGIC:
        raise InvalidConfig(f"{path} is not a GGUF file (it starts with {bytes(data[:4])!r})")
    cursor = _Cursor(data, size, 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise InvalidConfig(f"{path} has GGUF version {version}; versions 2 and 3 are supported, little-endian")
    num_tensors, num_keys = int(cursor.scalar("Q")), int(cursor.scalar("Q"))
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(int(cursor.scalar("I")))
    table = [
        (
            cursor.string(),
            [int(cursor.scalar("Q")) for _ in range(cursor.rank())],
            int(cursor.scalar("I")),
            int(cursor.scalar("Q")),
        )
        for _ in range(num_tensors)
    ]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise InvalidConfig(f"{path}: general.alignment {alignment!r} cannot be")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: _tensor(path, name, dims, kind, start + offset) for name, dims, kind, offset in table}
    end = max((info.offset + info.num_bytes for info in tensors.values()), default=0)
    if end > size:
        raise InvalidConfig(f"{path} is cut short: its tensors end at byte {end}, the file at {size}; fetch the file again")
    return GgufFile(path, metadata, tensors)


def _tensor(path: Path, name: str, dims: list[int], kind: int, offset: int) -> TensorInfo:
    if kind not in _ENCODINGS:
        known = ", ".join(encoding for encoding, _, _ in _ENCODINGS.values())
        raise InvalidConfig(f"{path}: tensor {name} is stored as GGML type {kind}; supported: {known}")
    encoding, block, block_bytes = _ENCODINGS[kind]
    if not dims or dims[0] % block:  # ggml lists the fastest dimension first
        raise InvalidConfig(f"{path}: tensor {name} of {dims} elements does not fill {encoding} blocks of {block}")
    count = 1
    for dim in dims:
        count *= dim
    return TensorInfo(name, tuple(reversed(dims)), encoding, path, offset, count // block * block_bytes)


class _Cursor:
    """Walks the header. Raises _Ended past its end."""

    def __init__(self, data: mmap.mmap, size: int, offset: int) -> None:
        self._data, self._size, self.offset = data, size, offset

    def _take(self, num_bytes: int) -> int:
        start = self.offset
        if num_bytes > self._size - start:
            raise _Ended
        self.offset = start + num_bytes
        return start

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from("<" + code, self._data, self._take(struct.calcsize("<" + code)))[0]
        return value

    def string(self) -> str:
        length = int(self.scalar("Q"))
        start = self._take(length)
        return self._data[start : start + length].decode()

    def rank(self) -> int:
        rank = int(self.scalar("I"))
        if rank > _MAX_RANK:
            raise OverflowError(f"a tensor of {rank} dimensions")
        return rank

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, length = int(self.scalar("I")), int(self.scalar("Q"))
        if length > _MAX_ITEMS:
            raise OverflowError(f"an array of {length} items")
        if kind == _STRING:
            return self._strings(length)
        code = _SCALARS[kind]  # arrays of arrays are a KeyError: no model uses them
        start = self._take(length * struct.calcsize("<" + code))
        array = np.frombuffer(self._data, dtype="<" + code if kind != _BOOL else "?", count=length, offset=start)
        values: list[Scalar] = array.tolist()
        return values

    def _strings(self, count: int) -> list[Scalar]:
        """The hot loop: a vocabulary has hundreds of thousands of strings."""
        if count * 8 > self._size - self.offset:
            raise _Ended
        data, size, offset, unpack = self._data, self._size, self.offset, struct.Struct("<Q").unpack_from
        strings: list[Scalar] = []
        for _ in range(count):
            if offset + 8 > size:
                raise _Ended
            (length,) = unpack(data, offset)
            offset += 8
            if length > size - offset:
                raise _Ended
            strings.append(data[offset : offset + length].decode())
            offset += length
        self.offset = offset
        return strings
