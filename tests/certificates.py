"""Certificates for tests, made by openssl: an authority and what it signs, valid or expired."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Issued:
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A CA of its own; `ca` is its certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.ca, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl("req", "-x509", *_EC, "-days", "2", "-keyout", self._key, "-out", self.ca, "-subj", f"/CN={name}")

    def issue(self, name: str, names: str = "DNS:shoal-cluster,IP:127.0.0.1", days: int = 1) -> Issued:
        """`days` below 0: expired so many days ago."""
        issued = Issued(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extension = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extension.write_text(f"subjectAltName={names}\n")
        _openssl("req", *_EC, "-keyout", issued.key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", str(days),
            "-extfile", extension, "-out", issued.certificate,
        )  # fmt: skip
        return issued


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
