"""Between Shoal's frozen types and the internal protos of the control stream. Knows both spellings, decides nothing."""

from shoal import errors
from shoal.errors import Mismatch, ShoalError, Unavailable
from shoal.pb.internal.v1 import transfer_pb2
from shoal.types import Fingerprint

MAX_ID_CHARACTERS = 256  # of a worker's or an attempt's id: what is refused is echoed and logged

_MAX_REASON = 4096  # characters of a peer's words that are passed on

_ERRORS: dict[str, type[ShoalError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, ShoalError)
}


def check_fingerprints(prefill: Fingerprint, decode: Fingerprint) -> None:
    """Raises Mismatch that names every field in which the two workers differ."""
    differences = prefill.differences(decode)
    if differences:
        raise Mismatch(
            "prefill and decode worker differ in " + "; ".join(differences) + " (prefill != decode): "
            "start both pools with the same model, dtype, block size and transfer settings"
        )


def rejection(attempt_id: str, error: ShoalError) -> transfer_pb2.ReceiverMessage:
    """`Reject` with the error's class and words. An empty attempt id refuses the whole pair."""
    reject = transfer_pb2.Reject(attempt_id=attempt_id, code=type(error).__name__, reason=str(error))
    return transfer_pb2.ReceiverMessage(reject=reject)


def rejected(message: transfer_pb2.Reject) -> ShoalError:
    """The error a `Reject` carries; an unknown class reads as Unavailable."""
    return _ERRORS.get(message.code, Unavailable)(message.reason[:_MAX_REASON])
