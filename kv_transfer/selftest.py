"""Does this torch still behave as the pair channels need it? Runs both ends of one pair in this process, before any peer comes.

Pair channels use torch's process groups below its public interface, so a new torch may break them quietly: order without tags,
several receives in flight, sizes. NCCL cannot be tried alone (two ranks on one GPU are refused): only its environment is checked.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import torch

from shoal.errors import InvalidConfig, Unavailable
from shoal.kv_transfer.channel import PairChannel
from shoal.kv_transfer.gloo import GlooChannel
from shoal.kv_transfer.rendezvous import twin_stores

_TIMEOUT_S = 10.0
_SIZES = (1, 70_001, 3)


@functools.cache
def check_gloo(host: str) -> None:
    """Send three messages in order over a Gloo pair on `host`, once per process. Raises InvalidConfig with words."""
    try:
        receiving, sending_end = twin_stores(_TIMEOUT_S)
        with ThreadPoolExecutor(1, "kv-selftest") as thread:
            sending = thread.submit(lambda: _send(GlooChannel(sending_end, 1, host, _TIMEOUT_S)))
            received = _receive(GlooChannel(receiving, 0, host, _TIMEOUT_S))
            sending.result()
    except Unavailable as error:
        raise InvalidConfig(
            f"the Gloo backend does not work on transfer.host {host!r} with torch {torch.__version__}: {error}"
        ) from error
    if received != [_pattern(i, size).tolist() for i, size in enumerate(_SIZES)]:
        raise InvalidConfig(
            f"Gloo of torch {torch.__version__} does not keep the order of messages; use a release that was tried"
        )


def _send(channel: PairChannel) -> None:
    works = [channel.send(i, _pattern(i, size)) for i, size in enumerate(_SIZES)]
    for work in works:
        work.wait(_TIMEOUT_S)


def _receive(channel: PairChannel) -> list[list[int]]:
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in _SIZES]
    works = [channel.post_recv(i, buffer) for i, buffer in enumerate(buffers)]
    for work in works:
        work.wait(_TIMEOUT_S)
    return [buffer.tolist() for buffer in buffers]


def _pattern(i: int, size: int) -> torch.Tensor:
    return torch.full((size,), i + 1, dtype=torch.uint8)
