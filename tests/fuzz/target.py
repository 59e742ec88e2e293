"""One parser under fire. Knows how its input is made and what it may answer; knows no engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.draw import Draw


@dataclass(frozen=True, slots=True)
class Target:
    """`call` may return, or raise a ShoalError other than InternalError; anything else is a finding."""

    name: str
    share: int  # of the inputs, per cent
    make: Callable[[Draw], Any]
    call: Callable[[Any], None]
