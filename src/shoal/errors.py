"""The exception tree. Knows what can go wrong and what the caller can do; knows nothing of gRPC (the table is rpc/status.py).

ShoalError
├── InvalidRequest        the request can never succeed as written; the message says what to change
│   └── InvalidConfig     the same for flags, YAML and model files, before anything is started
├── NotFound              a named thing (request, model) does not exist
├── AlreadyExists         the id is in use
├── CapacityExceeded      no room now; retry later or elsewhere
├── Unavailable           a worker, a pair or a transfer failed; retry is safe
│   └── Preempted         its blocks were needed by others; it goes on by replaying its tokens
├── DeadlineExceeded      the caller's time ran out
├── Cancelled             the caller (or the other leg) gave up
├── Unauthenticated       no valid credentials
├── Mismatch              two ends disagree (revision, dtype, block size, visibility); retry is useless
├── Unsupported           valid, but not offered
└── InternalError         a broken invariant: a bug of ours
"""


class ShoalError(Exception):
    """Base of every error Shoal raises on purpose. The text is written for the caller."""


class InvalidRequest(ShoalError):
    """The request can never succeed as written."""


class InvalidConfig(InvalidRequest):
    """A flag, a YAML entry or a model file is unusable; nothing was started."""


class NotFound(ShoalError):
    """A named thing does not exist."""


class AlreadyExists(ShoalError):
    """The id is in use."""


class CapacityExceeded(ShoalError):
    """No room now; the same request may succeed later or on another worker."""

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # when it is known that trying earlier is useless


class Unavailable(ShoalError):
    """A worker, a pair or a transfer failed; retrying is safe."""


class Preempted(Unavailable):
    """A running request gave its blocks up to others; it goes on where its tokens are replayed."""


class DeadlineExceeded(ShoalError):
    """The caller's time ran out."""


class Cancelled(ShoalError):
    """The caller, or the other leg of the request, gave up."""


class Unauthenticated(ShoalError):
    """No valid credentials came with the call."""


class Mismatch(ShoalError):
    """Two ends disagree about the model, the dtype, the block size or the visibility."""


class Unsupported(ShoalError):
    """A valid request for something that is not offered."""


class InternalError(ShoalError):
    """A broken invariant: a bug in Shoal, never the caller's doing."""
