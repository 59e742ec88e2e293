"""Files that are made once per machine: where they lie, and models that packages ship in pieces. Knows no model."""

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from shoal.errors import InvalidConfig

_PIECE_BYTES = 8 << 20


def cache_root() -> Path:
    """SHOAL_CACHE_DIR, else the user's cache folder for Shoal."""
    chosen = os.environ.get("SHOAL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def join_files(pieces: Sequence[Path], target: Path, sha256: str) -> Path:
    """`pieces` one after the other as `target`, made now if it is not there yet; processes that make it at once wait for one
    another, and it appears by one rename. Raises InvalidConfig when the pieces are not what they should be, or cannot be written.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _join(pieces, target, sha256)
    except OSError as error:
        raise InvalidConfig(
            f"cannot put {target.name} together in {target.parent}: {error.strerror}; set SHOAL_CACHE_DIR"
        ) from error
    return target


def _join(pieces: Sequence[Path], target: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with NamedTemporaryFile(dir=target.parent, delete=False) as out:
        try:
            for piece in pieces:
                with piece.open("rb") as file:
                    while data := file.read(_PIECE_BYTES):
                        digest.update(data)
                        out.write(data)
            if digest.hexdigest() != sha256:
                raise InvalidConfig(f"the pieces of {target.name} have another checksum than they should; install them again")
            out.flush()
            os.chmod(out.name, 0o644)
            os.replace(out.name, target)
        except BaseException:
            os.unlink(out.name)
            raise
