"""How a client connects and how often it tries: TLS, token, retries. Knows no request."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from shoal.errors import DeadlineExceeded, InvalidConfig, ShoalError, Unavailable

CALL_TIMEOUT_S: Final = 10.0  # of calls that generate nothing
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """A call that fails with UNAVAILABLE before its first answer is made again, after a pause that doubles.

    `attempts` counts the first; 1 never tries again. A stream that has begun is never repeated: the router itself resumes
    it on other workers.
    """

    attempts: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0

    def __post_init__(self) -> None:
        """Raises InvalidConfig that names the field."""
        if self.attempts < 1:
            raise InvalidConfig(f"attempts must be at least 1, not {self.attempts}")
        if not 0 <= self.first_pause_s <= self.longest_pause_s:
            raise InvalidConfig("first_pause_s must lie in 0…longest_pause_s")


class Attempts:
    """The attempts of one call, within one deadline."""

    def __init__(
        self,
        retry: Retry,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._retry, self._clock, self._rng = retry, clock, rng
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._num_failed = 0

    @property
    def time_left_s(self) -> float | None:
        """For the next attempt; None without a deadline. Raises DeadlineExceeded when there is none left."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed; allow more time")
        return left

    def pause_s(self, error: ShoalError, *, started: bool) -> float:
        """How long to wait before the next attempt. Raises the error when there is to be none."""
        self._num_failed += 1
        if started or not isinstance(error, Unavailable) or self._num_failed >= self._retry.attempts:
            raise error
        longest = min(self._retry.longest_pause_s, self._retry.first_pause_s * 2 ** (self._num_failed - 1))
        pause = self._rng(longest / 2, longest)
        if self._deadline is not None and self._clock() + pause >= self._deadline:
            raise error
        return pause


def bearer(token: str | None) -> Metadata:
    """The metadata that carries a token with every call. Send it over TLS only: it travels as it is."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def tls_credentials(
    *, ca: Path | str | None = None, certificate: Path | str | None = None, key: Path | str | None = None
) -> grpc.ChannelCredentials:
    """Credentials from PEM files: who signs servers (the system's own when None) and, for mutual TLS, who we are.

    Raises InvalidConfig when a file cannot be read, or a certificate comes without its key.
    """
    if (certificate is None) != (key is None):
        raise InvalidConfig("mutual TLS needs both a certificate and its key")
    return grpc.ssl_channel_credentials(_read(ca), _read(key), _read(certificate))


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
