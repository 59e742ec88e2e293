"""Reads request traces line by line. Knows the formats of Azure, BurstGPT, ServeGen, Mooncake and our own; keeps no lines.

CSV formats are told apart by their header, JSONL by the first line's fields:
- ours: arrival_s, input_tokens, output_tokens (CSV or JSONL; JSONL may add prefix_hashes)
- Azure (2023, 2024): TIMESTAMP, ContextTokens, GeneratedTokens
- BurstGPT: Timestamp (s), Request tokens, Response tokens; rows without a response failed at the source and are skipped
- ServeGen: arrival_s, input_tokens or text_tokens (+ image_tokens), output_tokens
- Mooncake: timestamp (ms), input_length, output_length, hash_ids (512-token prefix blocks)

Mooncake's conversation stamps sit in buckets of 3 s. Stamps that many rows share are spread evenly up to the next stamp.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from shoal.errors import InvalidConfig
from shoal.simulator.workload.requests import SimRequest

_MAX_SPREAD_S: Final = 3.0  # no bucket is known to be wider
_BUCKET_ROWS: Final = 3  # so many rows on one stamp are a bucket

Fields = Mapping[str, object]
Reader = Callable[[Fields], SimRequest | None]  # None: a row that is no request


@dataclass(slots=True)
class TraceNotes:
    """What reading a trace met on the way."""

    format: str = ""
    num_rows: int = 0
    num_malformed: int = 0
    malformed_lines: list[int] = field(default_factory=list)  # the first ten
    num_failed_at_source: int = 0


def read_trace(path: Path, notes: TraceNotes, *, strict: bool = False) -> Iterator[SimRequest]:
    """Requests in the file's order. Malformed rows are counted and skipped; with `strict` InvalidConfig names the line."""
    try:
        lines = path.open(newline="")
    except OSError as error:
        raise InvalidConfig(f"cannot read the trace {path}: {error}") from error
    with lines:
        rows, reader = _rows(path, lines, notes)
        yield from (
            _spread(_requests(path, rows, reader, notes, strict))
            if notes.format == "mooncake"
            else _requests(path, rows, reader, notes, strict)
        )


def _rows(path: Path, lines: TextIO, notes: TraceNotes) -> tuple[Iterator[tuple[int, Fields | None]], Reader]:
    """(line number, fields; None where they cannot be read) of every row, and how to read them."""
    if path.suffix == ".jsonl":
        first = lines.readline()
        lines.seek(0)
        keys = set(_json_fields(first) or {})
        names = _JSONL_FORMATS
        rows: Iterator[tuple[int, Fields | None]] = (
            (number, _json_fields(line)) for number, line in enumerate(iter(lines.readline, ""), 1) if line.strip()
        )
    else:
        reader = csv.DictReader(lines)
        keys = {name.strip() for name in reader.fieldnames or ()}
        names = _CSV_FORMATS
        rows = ((reader.line_num, row) for row in reader)
    for name, needed, read in names:
        if needed <= keys:
            notes.format = name
            return rows, read()
    known = "; ".join(f"{name}: {', '.join(sorted(needed))}" for name, needed, _ in names)
    raise InvalidConfig(f"{path}: unknown trace format with columns {', '.join(sorted(keys)) or '(none)'}; known: {known}")


def _requests(
    path: Path, rows: Iterable[tuple[int, Fields | None]], read: Reader, notes: TraceNotes, strict: bool
) -> Iterator[SimRequest]:
    for number, row in rows:
        notes.num_rows += 1
        try:
            if row is None:
                raise ValueError("not a JSON object")
            request = read(row)
        except (KeyError, TypeError, ValueError, InvalidConfig) as error:
            if strict:
                raise InvalidConfig(f"{path}, line {number}: malformed row ({error}); drop --strict to skip such rows") from error
            notes.num_malformed += 1
            if len(notes.malformed_lines) < 10:
                notes.malformed_lines.append(number)
            continue
        if request is None:
            notes.num_failed_at_source += 1
        else:
            yield request


def _spread(requests: Iterable[SimRequest]) -> Iterator[SimRequest]:
    """Spread buckets of equal stamps evenly up to the next stamp, at most 3 s."""
    bucket: list[SimRequest] = []
    width = _MAX_SPREAD_S
    for request in requests:
        if bucket and request.arrival_s != bucket[0].arrival_s:
            width = min(_MAX_SPREAD_S, request.arrival_s - bucket[0].arrival_s)
            yield from _spaced(bucket, width)
            bucket = []
        bucket.append(request)
    yield from _spaced(bucket, width)


def _spaced(bucket: list[SimRequest], width: float) -> Iterator[SimRequest]:
    if len(bucket) < _BUCKET_ROWS or width <= 0:
        yield from bucket
        return
    for index, request in enumerate(bucket):
        yield replace(request, arrival_s=request.arrival_s + width * index / len(bucket))


def _json_fields(line: str) -> Fields | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _number(row: Fields, name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _count(row: Fields, name: str) -> int:
    value = _number(row, name)
    if value != int(value):
        raise ValueError(f"{name} is {value!r}, not a whole number")
    return int(value)


def _hashes(row: Fields, name: str) -> tuple[int, ...]:
    value = row.get(name) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        raise ValueError(f"{name} should be a list of whole numbers")
    return tuple(value)


def _ours(row: Fields) -> SimRequest:
    hashes = _hashes(row, "prefix_hashes")
    return SimRequest(_number(row, "arrival_s"), _count(row, "input_tokens"), _count(row, "output_tokens"), hashes)


def _servegen_images(row: Fields) -> SimRequest:
    num_prompt = _count(row, "text_tokens") + (_count(row, "image_tokens") if row.get("image_tokens") else 0)
    return SimRequest(_number(row, "arrival_s"), num_prompt, _count(row, "output_tokens"))


def _mooncake(row: Fields) -> SimRequest:
    stamp_s = _number(row, "timestamp") / 1e3
    return SimRequest(stamp_s, _count(row, "input_length"), _count(row, "output_length"), _hashes(row, "hash_ids"))


def _burstgpt(row: Fields) -> SimRequest | None:
    num_output = _count(row, "Response tokens")
    if num_output == 0:
        return None
    return SimRequest(_number(row, "Timestamp"), _count(row, "Request tokens"), num_output)


def _azure() -> Reader:
    first: float | None = None

    def read(row: Fields) -> SimRequest:
        nonlocal first
        whole, _, fraction = str(row["TIMESTAMP"]).strip().split("+")[0].rstrip("Z").partition(".")
        stamp = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction or 0}")
        first = stamp if first is None else first
        return SimRequest(max(0.0, stamp - first), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))

    return read


_Format = tuple[str, frozenset[str], Callable[[], Reader]]  # name, the columns that tell it, its reader
_OURS: Final[_Format] = ("shoal", frozenset({"arrival_s", "input_tokens", "output_tokens"}), lambda: _ours)
_CSV_FORMATS: Final[tuple[_Format, ...]] = (
    ("azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    ("burstgpt", frozenset({"Timestamp", "Request tokens", "Response tokens"}), lambda: _burstgpt),
    ("servegen", frozenset({"client_id", "arrival_s", "text_tokens", "output_tokens"}), lambda: _servegen_images),
    _OURS,
)
_JSONL_FORMATS: Final[tuple[_Format, ...]] = (
    ("mooncake", frozenset({"timestamp", "input_length", "output_length"}), lambda: _mooncake),
    _OURS,
)
