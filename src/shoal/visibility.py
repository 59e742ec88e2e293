"""Which layers' KV a prompt token leaves behind for decode to see (design §2). Knows the text form; knows no model and no bytes.

Text forms: `full`, `speed:K`, `pop:K`, `pop:K:late`; every kind takes `:boundary=b`, `speed` takes `:anchors=a` and `:sink`.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Self, TypeVar

from shoal.errors import InvalidRequest

_FORMS = "full, speed:K[:anchors=a][:sink], pop:K[:late], each with an optional :boundary=b"
_DIGITS = re.compile("[0-9]+")
_MAX_NUMBER = 999_999_999
V = TypeVar("V", bound="Visibility")
_MAX_TEXT = 128  # characters; the longest canonical text has fewer


class VisibilityKind(StrEnum):
    """`full`: every layer. `speed`: the lower K layers and the anchors (SPEED). `pop`: projected KV above K (POP)."""

    FULL = "full"
    SPEED = "speed"
    POP = "pop"

    __hash__ = str.__hash__  # members are keys of much that is looked up for each request; Enum's own is written in Python


_OPTIONS = {  # which kinds take an option
    "boundary": frozenset(VisibilityKind),
    "anchors": frozenset({VisibilityKind.SPEED}),
    "sink": frozenset({VisibilityKind.SPEED}),
    "late": frozenset({VisibilityKind.POP}),
}
_FLAGS = frozenset({"late", "sink"})


@dataclass(frozen=True, slots=True)
class Visibility:
    """What prompt tokens leave behind. `boundary_tokens` is None until the router has resolved it.

    `str` gives the canonical text and `parse` reads it back. The text form's default is one anchor, the field's is none.
    Raises InvalidRequest when a field does not fit the kind.
    """

    kind: VisibilityKind = VisibilityKind.FULL
    prefill_layers: int | None = None  # K; None for `full`, where K = L
    anchor_tokens: int = 0  # a; `speed` only
    boundary_tokens: int | None = None  # b
    late: bool = False  # `pop` only: ship hidden states, project on the decode side
    sink: bool = False  # `speed` only: anchors stay visible beyond a sliding window in upper layers

    def __post_init__(self) -> None:
        if self.kind is VisibilityKind.FULL and self.prefill_layers is not None:
            raise InvalidRequest("visibility 'full' runs every layer and takes no prefill depth; write speed:K or pop:K")
        if self.kind is not VisibilityKind.FULL and (self.prefill_layers is None or self.prefill_layers < 1):
            raise InvalidRequest(f"visibility '{self.kind}' needs a prefill depth K >= 1, as in '{self.kind}:22'")
        if self.anchor_tokens < 0:
            raise InvalidRequest("anchors must be 0 or more")
        if self.kind is not VisibilityKind.SPEED and (self.anchor_tokens or self.sink):
            raise InvalidRequest(f"visibility '{self.kind}' takes neither anchors nor sink; only speed does")
        if self.kind is not VisibilityKind.POP and self.late:
            raise InvalidRequest(f"visibility '{self.kind}' does not take 'late'; only pop does")
        if self.boundary_tokens is not None and self.boundary_tokens < 1:
            raise InvalidRequest("boundary must be 1 or more: the last prompt token is always run at full depth")
        if max(self.prefill_layers or 0, self.anchor_tokens, self.boundary_tokens or 0) > _MAX_NUMBER:
            raise InvalidRequest(f"depth, anchors and boundary go up to {_MAX_NUMBER}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form (blanks around it are dropped). Raises InvalidRequest that names the part and what is accepted."""
        if len(text) > _MAX_TEXT:
            raise InvalidRequest(f"visibility of {len(text)} characters; accepted: {_FORMS}")
        head, *parts = text.strip().split(":")
        try:
            kind = VisibilityKind(head)
        except ValueError:
            raise InvalidRequest(f"unknown visibility {text!r}; accepted: {_FORMS}") from None
        depth: int | None = None
        if kind is VisibilityKind.FULL:
            if parts and _DIGITS.fullmatch(parts[0]):
                raise InvalidRequest(f"visibility {text!r}: 'full' runs every layer and takes no prefill depth")
        elif parts and _DIGITS.fullmatch(parts[0]):
            depth = _number(text, parts.pop(0))
        else:
            raise InvalidRequest(f"visibility {text!r} needs a prefill depth, as in '{kind}:22'")
        numbers, flags = _read_options(text, kind, parts)
        return cls(
            kind,
            depth,
            anchor_tokens=numbers.get("anchors", 1 if kind is VisibilityKind.SPEED else 0),
            boundary_tokens=numbers.get("boundary"),
            late="late" in flags,
            sink="sink" in flags,
        )

    def __str__(self) -> str:
        return _text(self)

    def resolve(self, num_layers: int, default_boundary_tokens: int = 1) -> Self:
        """Fix b, and turn K = L into `full`. Raises InvalidRequest when K > L.

        An explicit boundary is kept. Without one b is 1, or for `speed` `default_boundary_tokens`: the length of the chat
        template's generation prompt.
        """
        resolved: Self = _resolved(self, num_layers, default_boundary_tokens)
        return resolved

    @property
    def policy(self) -> Self:
        """The same visibility without its boundary: what an allow-list compares."""
        policy: Self = _policy(self)
        return policy

    def depth(self, num_layers: int) -> int:
        """K, with K = L for `full`."""
        return num_layers if self.prefill_layers is None else self.prefill_layers

    def split(self, num_prompt_tokens: int) -> "PromptSplit":
        """Divide a prompt of N tokens by this resolved visibility."""
        return _split(self, num_prompt_tokens)


# a request asks for these again and again, and few visibilities are in use
@lru_cache(maxsize=1024)
def _text(visibility: Visibility) -> str:
    parts = [str(visibility.kind)]
    if visibility.prefill_layers is not None:
        parts.append(str(visibility.prefill_layers))
    if visibility.kind is VisibilityKind.SPEED and visibility.anchor_tokens != 1:
        parts.append(f"anchors={visibility.anchor_tokens}")
    if visibility.sink:
        parts.append("sink")
    if visibility.late:
        parts.append("late")
    if visibility.boundary_tokens is not None:
        parts.append(f"boundary={visibility.boundary_tokens}")
    return ":".join(parts)


@lru_cache(maxsize=1024)
def _policy(visibility: V) -> V:
    return replace(visibility, boundary_tokens=None)


@lru_cache(maxsize=1024)
def _resolved(visibility: V, num_layers: int, default_boundary_tokens: int) -> V:
    depth = visibility.depth(num_layers)
    if depth > num_layers:
        raise InvalidRequest(f"visibility '{visibility}': prefill depth {depth} exceeds the model's {num_layers} layers")
    if depth == num_layers:
        return type(visibility)(VisibilityKind.FULL, boundary_tokens=visibility.boundary_tokens or 1)
    default = max(1, default_boundary_tokens) if visibility.kind is VisibilityKind.SPEED else 1
    return replace(visibility, boundary_tokens=visibility.boundary_tokens or default)


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """N, P and α of design §2: prefill tokens are [0, P), decode tokens [P, N) and all generated ones."""

    num_prompt_tokens: int  # N
    num_prefill_tokens: int  # P = max(0, N − b)
    num_anchor_tokens: int  # α = min(a, P) for `speed`, else 0


@lru_cache(maxsize=1024)
def _split(visibility: Visibility, num_prompt_tokens: int) -> PromptSplit:
    if visibility.boundary_tokens is None:
        raise ValueError("resolve the visibility before splitting a prompt")
    num_prefill_tokens = max(0, num_prompt_tokens - visibility.boundary_tokens)
    num_anchor_tokens = min(visibility.anchor_tokens, num_prefill_tokens)
    return PromptSplit(num_prompt_tokens, num_prefill_tokens, num_anchor_tokens)


def _read_options(text: str, kind: VisibilityKind, parts: list[str]) -> tuple[dict[str, int], set[str]]:
    """The `name=number` options and the flags after the depth. Raises InvalidRequest that names the part it cannot take."""
    numbers: dict[str, int] = {}
    flags: set[str] = set()
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in _OPTIONS:
            raise InvalidRequest(f"visibility {text!r}: cannot read {part!r}; accepted: {_FORMS}")
        if kind not in _OPTIONS[name]:
            raise InvalidRequest(f"visibility {text!r}: {kind} does not take {name!r}; accepted: {_FORMS}")
        if name in numbers or name in flags:
            raise InvalidRequest(f"visibility {text!r} gives {name!r} twice")
        if name in _FLAGS:
            if equals:
                raise InvalidRequest(f"visibility {text!r}: {name!r} takes no value")
            flags.add(name)
        elif _DIGITS.fullmatch(value):
            numbers[name] = _number(text, value)
        else:
            raise InvalidRequest(f"visibility {text!r}: {name!r} needs a whole number, as in '{name}=4'")
    return numbers, flags


def _number(text: str, digits: str) -> int:
    if len(digits) > len(str(_MAX_NUMBER)):
        raise InvalidRequest(f"visibility {text!r}: {digits} is too large; numbers go up to {_MAX_NUMBER}")
    return int(digits)
