"""What a killed `shoal serve` leaves in the folder for temporary files, and when it goes. Knows names, marks and ages.

A cluster's secret and a local Ray's folder lie there while the cluster runs, each marked with the process it belongs to. An
orderly end takes them away; after a kill the next start does. Logs of a Ray that died stay for an hour, for whoever wants
to know why.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from shoal.controller.owner import FOLDER_MARK, RAY_PREFIX, SHORT_FOLDER, Owner

SECRET_PREFIX: Final = "shoal-secret-"
_KEEP_LOGS_S: Final = 3600.0


def sweep_leftovers(folder: Path | None = None, keep_logs_s: float = _KEEP_LOGS_S) -> list[Path]:
    """Delete what dead processes of this user left; returns it. What has no mark, or whose owner may live, is not touched."""
    roots = {folder} if folder is not None else {Path(tempfile.gettempdir()), Path(SHORT_FOLDER)}
    swept = []
    for root in roots:
        for prefix, keep_s in ((SECRET_PREFIX, 0.0), (RAY_PREFIX, keep_logs_s)):
            for found in root.glob(f"{prefix}*"):
                if _is_stale(found, keep_s):
                    shutil.rmtree(found, ignore_errors=True)
                    swept.append(found)
    return swept


def _is_stale(folder: Path, keep_s: float) -> bool:
    try:
        status, mark = folder.lstat(), folder / FOLDER_MARK
        if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid():
            return False
        owner = Owner.read(mark.read_text(encoding="utf-8"))
        return owner is not None and owner.is_gone and time.time() - status.st_mtime >= keep_s
    except (OSError, UnicodeDecodeError):
        return False
