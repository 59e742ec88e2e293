"""Reads one tensor's bytes from a file into a given torch tensor, dequantised. Knows encodings; knows no model.

Bytes are read, not mapped, in bounded pieces: what is counted is what was read, and the peak is one piece.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from shoal.errors import InvalidConfig
from shoal.model_files import FileFormat, TensorInfo

_PIECE_BYTES = 8 << 20  # of float32
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorReader:
    """Reads tensors of one model. Not thread-safe."""

    def __init__(self, file_format: FileFormat) -> None:
        self._format = file_format
        self._files: dict[Path, int] = {}
        self.num_bytes_read = 0
        self.num_tensors_read = 0

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read_into(self, info: TensorInfo, out: torch.Tensor, *, pairs_of: int | None = None, offset: float = 0.0) -> None:
        """Fill `out` (shape info.shape, any float dtype and device) with the tensor.

        `pairs_of` = head_dim: rows of each head come as rotary pairs (2i, 2i+1), as llama GGUF files have them, and are
        put as (i, i + d/2). `offset` is added to every number, before it is rounded. Raises InvalidConfig when the file has
        become shorter or unreadable since it was opened.
        """
        rows, columns = (info.shape[0], info.shape[1]) if len(info.shape) == 2 else (1, info.shape[0])
        flat = out.view(rows, columns)
        unit = pairs_of or 1
        step = max(1, _PIECE_BYTES // (4 * columns * unit)) * unit
        row_bytes = info.num_bytes // rows
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            data = self._read(info, info.offset + start * row_bytes, (stop - start) * row_bytes)
            piece = self._decode(info, data, stop - start, columns)
            if pairs_of is not None:
                piece = piece.view(-1, pairs_of // 2, 2, columns).transpose(1, 2).reshape(stop - start, columns)
            flat[start:stop].copy_(piece.to(torch.float32) + offset if offset else piece)
        self.num_tensors_read += 1

    def _decode(self, info: TensorInfo, data: npt.NDArray[np.uint8], rows: int, columns: int) -> torch.Tensor:
        if info.encoding in _PLAIN:
            return torch.from_numpy(data).view(_PLAIN[info.encoding]).view(rows, columns)
        kind = gguf.GGMLQuantizationType[info.encoding]
        return torch.from_numpy(gguf.dequantize(data.reshape(rows, -1), kind))

    def _read(self, info: TensorInfo, offset: int, count: int) -> npt.NDArray[np.uint8]:
        buffer = bytearray(count)
        view = memoryview(buffer)
        try:
            if info.path not in self._files:
                self._files[info.path] = os.open(info.path, os.O_RDONLY)
            done = 0
            while done < count:
                num_bytes = os.preadv(self._files[info.path], [view[done:]], offset + done)
                if num_bytes == 0:
                    raise InvalidConfig(f"{info.path} was cut short within {info.name} since it was opened; fetch the file again")
                done += num_bytes
        except OSError as error:
            raise InvalidConfig(f"cannot read {info.path}: {error.strerror}") from error
        self.num_bytes_read += count
        return np.frombuffer(buffer, dtype=np.uint8)


@contextmanager
def open_reader(file_format: FileFormat) -> Iterator[TensorReader]:
    """A reader whose files are closed at the end."""
    reader = TensorReader(file_format)
    try:
        yield reader
    finally:
        reader.close()
