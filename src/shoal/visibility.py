"""Which layers' KV a prompt token leaves behind for decode to see (design §2). Knows the text form; knows no model and no bytes.

Text forms: `full`, `speed:K`, `pop:K`, `pop:K:late`; every kind takes `:boundary=b`, `speed` takes `:anchors=a` and `:sink`.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from shoal.errors import InvalidRequest

_FORMS = "full, speed:K[:anchors=a][:sink], pop:K[:late], each with an optional :boundary=b"


class VisibilityKind(StrEnum):
    """`full`: every layer. `speed`: the lower K layers and the anchors (SPEED). `pop`: projected KV above K (POP)."""

    FULL = "full"
    SPEED = "speed"
    POP = "pop"


@dataclass(frozen=True, slots=True)
class Visibility:
    """What prompt tokens leave behind. `boundary_tokens` is None until the router has resolved it.

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

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form. Raises InvalidRequest that names the offending part and the accepted forms."""
        head, *parts = text.strip().split(":")
        try:
            kind = VisibilityKind(head)
        except ValueError:
            raise InvalidRequest(f"unknown visibility {text!r}; accepted: {_FORMS}") from None
        depth: int | None = None
        if kind is not VisibilityKind.FULL:
            if not parts or not _is_number(parts[0]):
                raise InvalidRequest(f"visibility {text!r} needs a prefill depth, as in '{kind}:22'")
            depth = int(parts.pop(0))
        options: dict[str, int | bool] = {"anchor_tokens": 1} if kind is VisibilityKind.SPEED else {}
        seen: set[str] = set()
        for part in parts:
            name, equals, value = part.partition("=")
            if name in seen:
                raise InvalidRequest(f"visibility {text!r} gives {name!r} twice")
            seen.add(name)
            if name in ("late", "sink") and not equals:
                options[name] = True
            elif name in ("anchors", "boundary") and _is_number(value):
                options[{"anchors": "anchor_tokens", "boundary": "boundary_tokens"}[name]] = int(value)
            else:
                raise InvalidRequest(f"visibility {text!r}: cannot read {part!r}; accepted: {_FORMS}")
        return cls(kind, depth, **options)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [str(self.kind)]
        if self.prefill_layers is not None:
            parts.append(str(self.prefill_layers))
        if self.kind is VisibilityKind.SPEED and self.anchor_tokens != 1:
            parts.append(f"anchors={self.anchor_tokens}")
        if self.sink:
            parts.append("sink")
        if self.late:
            parts.append("late")
        if self.boundary_tokens is not None:
            parts.append(f"boundary={self.boundary_tokens}")
        return ":".join(parts)

    def resolve(self, num_layers: int, default_boundary_tokens: int = 1) -> Self:
        """Fix b, and turn K = L into `full` (with the explicit boundary, else 1). Raises InvalidRequest when K > L."""
        if self.prefill_layers is not None and self.prefill_layers > num_layers:
            raise InvalidRequest(
                f"visibility '{self}': prefill depth {self.prefill_layers} exceeds the model's {num_layers} layers"
            )
        if self.kind is VisibilityKind.FULL or self.prefill_layers == num_layers:
            return type(self)(VisibilityKind.FULL, boundary_tokens=self.boundary_tokens or 1)
        return replace(self, boundary_tokens=self.boundary_tokens or default_boundary_tokens)

    @property
    def policy(self) -> Self:
        """The same visibility without its boundary: what an allow-list compares."""
        return replace(self, boundary_tokens=None)

    def depth(self, num_layers: int) -> int:
        """K, with K = L for `full`."""
        return num_layers if self.prefill_layers is None else self.prefill_layers

    def split(self, num_prompt_tokens: int) -> "PromptSplit":
        """Divide a prompt of N tokens by this resolved visibility."""
        if self.boundary_tokens is None:
            raise ValueError("resolve the visibility before splitting a prompt")
        num_prefill_tokens = max(0, num_prompt_tokens - self.boundary_tokens)
        num_anchor_tokens = min(self.anchor_tokens, num_prefill_tokens)
        return PromptSplit(num_prompt_tokens, num_prefill_tokens, num_anchor_tokens)


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """N, P and α of design §2: prefill tokens are [0, P), decode tokens [P, N) and all generated ones."""

    num_prompt_tokens: int  # N
    num_prefill_tokens: int  # P = max(0, N − b)
    num_anchor_tokens: int  # α = min(a, P) for `speed`, else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
