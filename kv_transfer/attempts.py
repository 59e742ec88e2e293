"""What a decode worker expects and what has ended, over all its pairs. Knows ids and deadlines, no messages, no tensors."""

from collections import OrderedDict
from dataclasses import dataclass

from shoal.errors import AlreadyExists, Cancelled, Mismatch, Unavailable
from shoal.kv_transfer.handle import Handle
from shoal.placement.plan import TransferPlan


@dataclass(slots=True)
class Expected:
    """One reservation. `lease_ends_s` is None once a prefill worker has opened it."""

    handle: Handle
    plan: TransferPlan
    lease_ends_s: float | None


class AttemptBook:
    """Attempts by id: expected → claimed → ended, each once. Ended ids are remembered for the longest deadline."""

    def __init__(self, *, lease_s: float, remember_s: float) -> None:
        self._lease_s = lease_s
        self._remember_s = remember_s
        self._expected: dict[str, Expected] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()  # id → when it may be forgotten

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, handle: Handle, plan: TransferPlan, now_s: float) -> None:
        """A reservation was made. Raises AlreadyExists for an id that is expected or has ended, Mismatch for another plan."""
        attempt_id = handle.attempt_id
        if attempt_id in self._expected or attempt_id in self._ended:
            raise AlreadyExists(f"attempt {attempt_id} is known already; every attempt needs an id of its own")
        if handle.plan_digest != plan.digest:
            raise Mismatch(f"plan_digest: {handle.plan_digest} in the handle != {plan.digest} of the plan")
        self._expected[attempt_id] = Expected(handle, plan, now_s + self._lease_s)

    def claim(self, handle: Handle) -> TransferPlan:
        """A prefill worker opens an attempt. Raises Cancelled or Unavailable (no reservation), AlreadyExists or Mismatch."""
        attempt_id = handle.attempt_id
        if attempt_id in self._ended:
            raise Cancelled(f"attempt {attempt_id} has ended on the decode worker")
        expected = self._expected.get(attempt_id)
        if expected is None:
            raise Unavailable(f"attempt {attempt_id} has no reservation on this decode worker")
        if expected.lease_ends_s is None:
            raise AlreadyExists(f"attempt {attempt_id} has been opened already")
        handle.check_against(expected.handle)
        expected.lease_ends_s = None
        return expected.plan

    def end(self, attempt_id: str, now_s: float) -> bool:
        """The attempt is over, however. False when it was unknown or over already."""
        if self._expected.pop(attempt_id, None) is None:
            return False
        self._ended[attempt_id] = now_s + self._remember_s
        return True

    def is_expected(self, attempt_id: str) -> bool:
        return attempt_id in self._expected

    def has_ended(self, attempt_id: str) -> bool:
        return attempt_id in self._ended

    def sweep(self, now_s: float) -> list[str]:
        """Forget old ids, and list the reservations that nobody opened within their lease."""
        while self._ended and next(iter(self._ended.values())) <= now_s:
            self._ended.popitem(last=False)
        return [key for key, e in self._expected.items() if e.lease_ends_s is not None and e.lease_ends_s <= now_s]
