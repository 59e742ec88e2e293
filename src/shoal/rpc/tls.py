"""TLS from PEM files that may be replaced while a server runs. Knows files and handshakes; knows no service.

Every handshake looks whether a file has changed. New files are taken once they fit together; until then, and when they never
do, the last good ones stay in force. Connections that are open go on as they are.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from shoal.config.tls import TlsConfig
from shoal.errors import InvalidConfig

_log = logging.getLogger(__name__)
_Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents that fit together."""

    certificate: bytes
    key: bytes
    ca: bytes | None


class PemFiles:
    """The files of one TlsConfig. Thread-safe."""

    def __init__(self, tls: TlsConfig) -> None:
        """Raises InvalidConfig when they cannot be used now."""
        self._tls = tls
        self._lock = threading.Lock()
        self._seen = self._signature()
        self.pem = self._read()

    def refresh(self) -> bool:
        """Take changed files that fit together; whether there were any."""
        with self._lock:
            try:
                signature = self._signature()
                if signature == self._seen:
                    return False
                pem = self._read()
                if self._signature() != signature:  # being written: the next handshake looks again
                    return False
            except InvalidConfig as error:
                _log.warning("keeping the last TLS files: %s", error)
                return False
            self.pem, self._seen = pem, signature
            _log.info("took new TLS files: %s", self._tls.certificate)
            return True

    def context(self) -> ssl.SSLContext:
        """For servers that are not gRPC's. Raises InvalidConfig."""
        tls = self._tls
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")  # an encrypted key must not ask a terminal
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            words = f"{tls.certificate} and {tls.key} are no certificate and its unencrypted key in PEM form ({_reason(error)})"
            raise InvalidConfig(words) from None
        if tls.ca:
            try:
                context.load_verify_locations(tls.ca)
            except (OSError, ValueError) as error:
                raise InvalidConfig(f"{tls.ca} holds no certificates in PEM form ({_reason(error)})") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _read(self) -> Pem:
        tls = self._tls
        self.context()
        return Pem(_bytes(tls.certificate), _bytes(tls.key), _bytes(tls.ca) if tls.ca else None)

    def _signature(self) -> _Signature:
        try:
            found = [Path(path).stat() for path in (self._tls.certificate, self._tls.key, self._tls.ca) if path]
        except OSError as error:
            raise InvalidConfig(f"cannot read {error.filename}: {error.strerror}") from None
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """Of a gRPC server; None without TLS. Raises InvalidConfig when the files cannot be used."""
    if not tls.is_on:
        return None
    files = PemFiles(tls)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return _configuration(files.pem) if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.pem),
        fetch,  # type: ignore[arg-type]  # None means unchanged
        require_client_authentication=tls.require_client_certificate,
    )


def http_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Of an HTTP server; None without TLS. Each handshake uses the newest files. Raises InvalidConfig."""
    if not tls.is_on:
        return None
    files = PemFiles(tls)
    first = newest = files.context()

    def on_hello(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal newest
        if files.refresh():
            newest = files.context()
        connection.context = newest

    first.sni_callback = on_hello  # called for each ClientHello, with and without a name
    return first


def member_credentials(tls: TlsConfig) -> grpc.ChannelCredentials | None:
    """With which a member of the cluster calls another; None without TLS. Read anew for each channel. Raises InvalidConfig."""
    if not tls.is_on:
        return None
    pem = PemFiles(tls).pem
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.ca)


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
