"""Whose turn a request takes in a queue: its class and its tenant. Knows names and weights; knows no queue."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.errors import InvalidRequest

MAX_TENANT_CHARACTERS: Final = 64


class Priority(StrEnum):
    """A request's class. While all wait, work is let in by weight; no class ever waits for another to run dry."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    __hash__ = str.__hash__  # looked up several times for each request; Enum's own is written in Python

    @property
    def rank(self) -> int:
        """0 for the lowest."""
        return _RANKS[self]

    @property
    def weight(self) -> int:
        """Its share of what is let in while every class waits."""
        return _WEIGHTS[self]

    @classmethod
    def parse(cls, text: str) -> "Priority":
        """ "" is normal. Raises InvalidRequest."""
        try:
            return cls(text or cls.NORMAL)
        except ValueError:
            raise InvalidRequest(f"priority must be {', '.join(cls)}, not {text[:40]!r}") from None


_RANKS: Final[Mapping[Priority, int]] = {priority: rank for rank, priority in enumerate(Priority)}
_WEIGHTS: Final[Mapping[Priority, int]] = {Priority.LOW: 1, Priority.NORMAL: 4, Priority.HIGH: 16}


@dataclass(frozen=True, slots=True)
class Turn:
    """What decides where a request stands among those that wait, beside when it came and what it needs."""

    priority: Priority = Priority.NORMAL
    tenant: str = ""  # "" where no tokens are asked for

    @classmethod
    def parse(cls, priority: str, tenant: str) -> "Turn":
        """As it travels between router and workers. Raises InvalidRequest."""
        if len(tenant) > MAX_TENANT_CHARACTERS:
            raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT_CHARACTERS} characters, not {len(tenant)}")
        return cls(Priority.parse(priority), tenant)


USUAL_TURN: Final = Turn()
