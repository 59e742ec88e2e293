"""Turns a string of bytes into structured input: the same bytes always give the same input. Knows JSON, protobuf and text.

A generator asks for choices, and the bytes answer; when they run out, every answer is 0. So an input is reproduced by its bytes,
and any engine that makes bytes (a seeded generator, a coverage-guided fuzzer) can drive every target.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")
INTEGERS = (
    0, 1, -1, 2, 3, 7, 20, 21, 64, 127, 128, 255, 300, 1024, 4096, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1,
    2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**40, 10**400,
)  # fmt: skip
NUMBERS = (0.0, -0.0, 0.5, 1.0, 2.0, -2.0, 1e-300, 3.5e38, 1e308, float("inf"), float("-inf"), float("nan"), 100.5)
WORDS = (
    "", "a", "user", "assistant", "system", "tool", "function", "name", "arguments", "text", "type", "full", "speed:2", "pop:2",
    "speed:2:anchors=1", "speed:22:boundary=4", "[[", "{{", "{%", "null", "NaN", "\x00", "\n", " ", "\u00e9", "\u4f60\u597d",
    "\U0001f41f", "\u202e", "<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>", "\\ud800", "../../etc/passwd", "%s%n",
    "'; DROP", "$defs", "#/$defs/a", "required", "auto", "none", "9" * 20, "-", ":", "=", ",", '"', "\\",
)  # fmt: skip


class Draw:
    """Choices, answered by bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.size = 0  # of what has been made, roughly, so that no input grows without end
        self.is_calm = self.chance(50)  # mostly plausible values, so that some inputs get far

    @property
    def is_spent(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        if self.is_spent:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def below(self, limit: int) -> int:
        """0 … limit − 1."""
        value = self.byte()
        while limit > 256 and not self.is_spent:
            value, limit = value << 8 | self.byte(), limit >> 8
        return value % max(1, limit)

    def chance(self, percent: int) -> bool:
        """The likelier answer once the bytes are spent."""
        return self.below(100) < percent if percent >= 50 else self.below(100) >= 100 - percent

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def integer(self) -> int:
        if self.is_calm and self.chance(97):
            return self.below(4)
        return self.pick(INTEGERS) if self.chance(50) else self.below(70000)

    def number(self) -> float | int:
        if self.is_calm and self.chance(97):
            return self.pick((0.0, 0.5, 1.0))
        return self.pick(NUMBERS) if self.chance(60) else self.below(70000) / 7 if self.chance(50) else self.integer()

    def count(self, usual: int = 4) -> int:
        """How many of something: few, seldom very many."""
        if not self.is_calm and self.chance(1) and self.size < 10_000:
            return self.pick((65, 129, 1025, 5000, 20_000))
        return self.below(usual)

    def text(self) -> str:
        if self.is_calm and self.chance(95):
            return self.pick(WORDS[1:12])
        parts = [self._piece() for _ in range(1 + self.below(3))]
        made = "".join(parts)
        self.size += len(made)
        return made

    def _piece(self) -> str:
        match self.below(8):
            case 7 if self.size < 10_000:
                return self.pick(WORDS) * self.count(300)
            case 6:
                return "".join(chr(self.pick((32, 0x41, 0x300, 0x3042, 0x1F300)) + self.below(60)) for _ in range(self.below(12)))
            case _:
                return self.pick(WORDS)

    def raw(self, most: int = 40) -> bytes:
        return bytes(self.byte() for _ in range(self.below(most)))

    def json(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.below(9 if depth < 5 else 6)
        self.size += 1
        match kind:
            case 0:
                return None
            case 1:
                return self.chance(50)
            case 2:
                return self.integer()
            case 3:
                return self.number()
            case 4 | 5:
                return self.text()
            case 6:
                return [self.json(depth + 1) for _ in range(min(self.count(), 2000))]
            case 7 if self.chance(5):
                return self.nested()
            case _:
                return {self.text(): self.json(depth + 1) for _ in range(self.below(4))}

    def nested(self) -> Any:
        """A value that is deep and nothing else."""
        value: Any = 0
        for _ in range(self.pick((10, 90, 400, 800))):
            value = [value] if self.size % 2 else {"a": value}
        return value

    def json_text(self, value: Any) -> str:
        """As a careless or hostile client writes it: NaN, half characters, depth, damage."""
        text = json.dumps(value, ensure_ascii=self.chance(30))
        if self.chance(4):
            text = text.replace('"', '"\\ud83d', 1)
        if self.chance(2):
            text = self.pick(
                ("[" * 100_000, '{"a":' * 50_000, "9" * 5000, '{"a":' + "9" * 5000 + "}", "-", "[" * 2000 + "]" * 2000)
            )
        return text

    def damaged(self, data: bytes, percent: int = 15) -> bytes:
        """Now and then with bytes changed, cut, doubled."""
        if not data or not self.chance(percent):
            return data
        made = bytearray(data)
        for _ in range(1 + self.below(4)):
            at = self.below(len(made)) if made else 0
            match self.below(5):
                case 0:
                    made[at : at + 1] = bytes([self.byte()])
                case 1:
                    del made[at : at + 1 + self.below(8)]
                case 2:
                    made[at:at] = self.raw()
                case 3:
                    del made[at:]
                case _:
                    made[at:at] = made[at : at + self.below(64)]
        return bytes(made)

    def message(self, message: Message, hints: "Mapping[str, Callable[[Draw], Any]] | None" = None, depth: int = 0) -> Message:
        """Fill a protobuf message; `hints` name fields whose values are made by a function."""
        for field in message.DESCRIPTOR.fields:
            is_wanted = self.is_calm and hints is not None and field.name in hints and field.containing_oneof is None
            if depth > 4 or not (self.chance(45) or is_wanted):
                continue
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if is_map:
                self._fill_map(getattr(message, field.name), field)
            elif field.is_repeated:
                target = getattr(message, field.name)
                for _ in range(max(self.count(), is_wanted)):
                    if field.message_type is not None:
                        self.message(target.add(), hints, depth + 1)
                    else:
                        target.append(self._scalar(field, hints))
            elif field.message_type is not None:
                child = getattr(message, field.name)
                child.SetInParent()
                self.message(child, hints, depth + 1)
            else:
                setattr(message, field.name, self._scalar(field, hints))
        return message

    def _fill_map(self, target: Any, field: FieldDescriptor) -> None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self.count()):
            target[self._scalar(key, None)] = self._scalar(value, None)

    def _scalar(self, field: FieldDescriptor, hints: "Mapping[str, Callable[[Draw], Any]] | None") -> Any:
        if hints is not None and field.name in hints and self.chance(97 if self.is_calm else 80):
            return hints[field.name](self)
        kind = FieldDescriptor
        match field.cpp_type:
            case kind.CPPTYPE_STRING:
                if field.type == kind.TYPE_BYTES:
                    return self.raw()
                return self.text()
            case kind.CPPTYPE_BOOL:
                return self.chance(50)
            case kind.CPPTYPE_DOUBLE | kind.CPPTYPE_FLOAT:
                number = self.number()
                return float(number) if abs(number) < 1e38 or number != number else self.pick((float("inf"), 1e38))
            case kind.CPPTYPE_ENUM:
                return 0
        bits, signed = (64 if "64" in kind_name(field) else 32), field.cpp_type in (kind.CPPTYPE_INT32, kind.CPPTYPE_INT64)
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return min(max(self.integer(), low), high)


def kind_name(field: FieldDescriptor) -> str:
    """`int64`, `uint32` …"""
    names = {FieldDescriptor.CPPTYPE_INT64: "int64", FieldDescriptor.CPPTYPE_UINT64: "uint64"}
    return names.get(field.cpp_type, "int32")
