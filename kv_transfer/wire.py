"""Between Shoal's frozen types and the internal protos of the control stream. Knows both spellings, decides nothing."""

from shoal import errors
from shoal.errors import Mismatch, ShoalError, Unavailable
from shoal.pb.internal.v1 import transfer_pb2, worker_pb2
from shoal.types import DType, Fingerprint

MAX_TEXT_CHARACTERS = 1024  # of a fingerprint's field
MAX_ID_CHARACTERS = 256  # of a worker's or an attempt's id: what is refused is echoed and logged

_MAX_REASON = 4096  # characters of a peer's words that are passed on

_ERRORS: dict[str, type[ShoalError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, ShoalError)
}


def fingerprint_to_pb(fingerprint: Fingerprint) -> worker_pb2.Fingerprint:
    """The same fields, for `Hello`."""
    return worker_pb2.Fingerprint(
        revision=fingerprint.revision,
        adapter=fingerprint.adapter,
        num_layers=fingerprint.num_layers,
        hidden_size=fingerprint.hidden_size,
        num_kv_heads=fingerprint.num_kv_heads,
        head_dim=fingerprint.head_dim,
        dtype=str(fingerprint.dtype),
        block_size=fingerprint.block_size,
        rope=fingerprint.rope,
        max_entry_bytes=fingerprint.max_entry_bytes,
        max_entry_tokens=fingerprint.max_entry_tokens,
    )


def fingerprint_from_pb(message: worker_pb2.Fingerprint) -> Fingerprint:
    """Raises Mismatch when the peer's dtype is one this build does not know, or a text too long to be quoted."""
    for name in ("revision", "adapter", "dtype", "rope"):
        if len(getattr(message, name)) > MAX_TEXT_CHARACTERS:
            raise Mismatch(f"the peer's {name} has more than {MAX_TEXT_CHARACTERS} characters")
    return Fingerprint(
        revision=message.revision,
        adapter=message.adapter,
        num_layers=message.num_layers,
        hidden_size=message.hidden_size,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=parse_dtype(message.dtype),
        block_size=message.block_size,
        rope=message.rope,
        max_entry_bytes=message.max_entry_bytes,
        max_entry_tokens=message.max_entry_tokens,
    )


def parse_dtype(text: str) -> DType:
    """Raises Mismatch for an element type this build does not know."""
    try:
        return DType(text)
    except ValueError:
        raise Mismatch(f"the peer's dtype {text!r} is unknown here; known: {', '.join(DType)}") from None


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
