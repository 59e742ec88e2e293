"""When a dead worker is started again, and when no more. Pure: no clock and no Ray."""

from dataclasses import dataclass

from shoal.errors import CapacityExceeded, InvalidRequest, Mismatch, NotFound, ShoalError, Unsupported

_HOPELESS = (InvalidRequest, Mismatch, NotFound, Unsupported, CapacityExceeded)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `max_delay_s`; after `max_failures` failed starts in a row a worker is given up."""

    first_delay_s: float = 0.25
    max_delay_s: float = 15.0
    max_failures: int = 4

    def delay_s(self, num_failures: int) -> float | None:
        """Seconds to wait after so many failed starts in a row (0: none, it had been serving); None: give up."""
        if num_failures >= self.max_failures:
            return None
        if num_failures == 0:
            return 0.0
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (num_failures - 1))

    @staticmethod
    def is_hopeless(error: BaseException) -> bool:
        """Whether starting again with the same configuration must fail the same way (a bad model, too little memory)."""
        return isinstance(error, ShoalError) and isinstance(error, _HOPELESS)
