"""The tensor tables of safetensors files, single or sharded, checked against the files' sizes. Reads no weights.

Format: 8 bytes of header length, a JSON header of name → dtype, shape, byte range, then the data.
"""

import json
import struct
from pathlib import Path

from shoal.errors import InvalidConfig
from shoal.model_files.tensors import TensorInfo

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 << 20


def read_json(path: Path) -> dict[str, object]:
    """A JSON object. Raises InvalidConfig when the file is missing or something else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, a number of thousands of digits; endless nesting
        raise InvalidConfig(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidConfig(f"{path} should hold a JSON object")
    return value


def read_tensor_table(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a folder's safetensors. Raises InvalidConfig when a file is missing, cut short or not such a file."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise InvalidConfig(f"{folder} holds neither {_SINGLE} nor {_INDEX}; only safetensors weights are supported")
        return read_header(folder / _SINGLE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidConfig(f"{index} has no weight_map of tensor names to file names")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise InvalidConfig(f"{index} names {shard!r}, which is not a file of this folder")
        if not (folder / shard).exists():
            raise InvalidConfig(f"{folder} lacks {shard}, which {_INDEX} names; fetch the missing shard")
        tensors |= read_header(folder / shard)
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises InvalidConfig as above."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (size,)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise InvalidConfig(f"{path} is cut short within its header, or not a safetensors file; fetch the file again")
            header = json.loads(file.read(length))
        tensors = {name: _tensor(path, name, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidConfig(f"{path} has a damaged safetensors header ({error!s:.200}); fetch the file again") from error
    end = max((info.offset + info.num_bytes for info in tensors.values()), default=0)
    if end > size:
        raise InvalidConfig(f"{path} is cut short: its tensors end at byte {end}, the file at {size}; fetch the file again")
    return tensors


def _tensor(path: Path, name: str, data_start: int, entry: dict[str, object]) -> TensorInfo:
    encoding, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if encoding not in _ELEMENT_BYTES:
        raise InvalidConfig(f"{path}: tensor {name} is stored as {encoding}; supported: {', '.join(_ELEMENT_BYTES)}")
    if not (isinstance(encoding, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise TypeError(f"tensor {name}")
    start, stop = (int(offset) for offset in offsets)
    count = 1
    for dim in shape:
        count *= int(dim)
    if not 0 <= start <= stop or stop - start != count * _ELEMENT_BYTES[encoding]:
        raise ValueError(f"tensor {name} of shape {shape} cannot take {stop - start} bytes")
    return TensorInfo(name, tuple(int(dim) for dim in shape), encoding, path, data_start + start, stop - start)
