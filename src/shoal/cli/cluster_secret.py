"""Makes and keeps the file by which the processes of a cluster know each other. Knows paths and modes; starts nothing."""

import os
import secrets
from pathlib import Path

from shoal.errors import InvalidConfig


def new_secret(path: Path) -> Path:
    """Write 256 random bits to a file that only we may read, whole or not at all. Raises FileExistsError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(new, path)  # unlike a rename, it never replaces
    finally:
        new.unlink()
    return path


def state_folder(*parts: str) -> Path:
    """Where this user's clusters keep what outlives a command. Raises InvalidConfig."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state").joinpath("shoal", *parts)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"cannot make {folder}: {error.strerror}; set XDG_STATE_HOME to a folder of yours") from None
    return folder


def kept_secret(name: str) -> Path:
    """The secret that all clusters of this user and name share, made on first use. Raises InvalidConfig."""
    try:
        path = state_folder() / f"{''.join(c if c.isalnum() else '_' for c in name)}.cluster-secret"
    except InvalidConfig as error:
        raise InvalidConfig(f"{error}, or give --cluster-secret-file") from None
    try:
        return new_secret(path)
    except FileExistsError:
        return path
    except OSError as error:
        raise InvalidConfig(f"cannot keep a cluster secret at {path}: {error.strerror}; give --cluster-secret-file") from None
