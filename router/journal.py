"""What the log and the request counter say of a request's start and end. Knows ids, names and counts; no text, no token ids."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.config.logs import bind_log_ids, log_event, log_ids, loggable
from shoal.errors import InternalError, ShoalError, Unavailable
from shoal.router import instruments
from shoal.router.admission import Admitted
from shoal.router.dispatch import DispatchReport
from shoal.router.generation import Generation
from shoal.router.scoring import Scoring
from shoal.router.tenants import tenant_name
from shoal.rpc import to_status
from shoal.rpc.tracing import traced

_log = logging.getLogger(__name__)


class Entry:
    """One request's entry: how it goes, filled in on the way."""

    def __init__(self, request_id: str, arrived: float) -> None:
        self.outcome = "cancelled"  # unless something else is noted
        self.request_id = request_id
        self.arrived = arrived
        self._admitted: Admitted | None = None
        self._running: Generation | Scoring | None = None
        self._error: BaseException | None = None

    @property
    def policy(self) -> str:
        """The metric's label; `none` for a request that was refused."""
        return self._admitted.policy if self._admitted is not None else "none"

    def admitted(self, admitted: Admitted) -> None:
        """It may run."""
        self._admitted = admitted
        self.request_id = admitted.request_id
        bind_log_ids(request_id=admitted.request_id)
        request = admitted.dispatch
        log_event(
            _log, logging.INFO, "request accepted", visibility=request.visibility, prompt_tokens=len(request.prompt_ids),
            max_tokens=request.num_expected_tokens, n=request.num_children, streams=admitted.streams,
            priority=request.turn.priority,
        )  # fmt: skip
        for notice in request.notices:
            instruments.FALLBACKS.labels("admission").inc()
            log_event(_log, logging.WARNING, "fallback", notice=notice)

    def runs_as(self, running: Generation | Scoring) -> None:
        """Where its figures are."""
        self._running = running

    def failed(self, error: BaseException) -> None:
        """It ends with an error."""
        self._error = error
        self.outcome = to_status(error).name.lower() if isinstance(error, ShoalError) else "internal"

    def close(self, now: float) -> None:
        """It is over: count it and say so."""
        instruments.REQUESTS.labels(self.outcome, self.policy).inc()
        error = self._error
        is_fault = error is not None and (not isinstance(error, ShoalError) or isinstance(error, InternalError | Unavailable))
        fields: dict[str, object] = {"outcome": self.outcome, "tenant": tenant_name(), "total_s": now - self.arrived}
        if self._admitted is not None:
            request = self._admitted.dispatch
            fields |= {"visibility": request.visibility, "prompt_tokens": len(request.prompt_ids)}
            fields |= {"images": len(request.images), "image_tokens": request.num_image_tokens} if request.images else {}
        if self._running is not None:
            fields |= _figures(self._running, self.arrived)
        if error is not None:
            fields["error"] = loggable(error) if isinstance(error, ShoalError) else type(error).__name__
        level = logging.WARNING if is_fault else logging.INFO
        log_event(_log, level, "request finished", request_id=self.request_id, **fields)


@contextmanager
def journal(request_id: str, clock: Callable[[], float]) -> Iterator[Entry]:
    """A request is served inside; lines written meanwhile carry its id."""
    entry = Entry(request_id, clock())
    with log_ids(request_id=request_id), traced("request") as span:
        try:
            yield entry
        except Exception as error:
            entry.failed(error)
            raise
        finally:
            entry.close(clock())
            span |= {"request_id": entry.request_id, "outcome": entry.outcome, "visibility": entry.policy}


def _figures(running: Generation | Scoring, arrived: float) -> dict[str, object]:
    report: DispatchReport = running.report
    attempt, own = report.attempt, {}
    if isinstance(running, Generation):
        first = running.moments.first_token
        own = {
            "completion_tokens": sum(len(answer.tokens) for answer in running.answers),
            "ttft_s": None if first is None else first - arrived,
        }
    return {
        **own,
        "num_retries": report.num_retries,
        "num_preemptions": report.num_preemptions,
        "payload_bytes": max((end.received_payload_bytes for end in attempt.finished.values()), default=None),
        "prefill_at": attempt.reserved.prefill_at if attempt.reserved is not None else "",
        "prefill_worker": attempt.prefill_worker,
        "decode_worker": attempt.decode_worker,
        "attempt_id": attempt.reserved.attempt_id if attempt.reserved is not None else "",
    }
