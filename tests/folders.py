"""Folders that last as long as the test process."""

import atexit
import shutil
from pathlib import Path
from tempfile import mkdtemp


def temporary_folder() -> Path:
    """A new folder, removed when this process ends."""
    folder = Path(mkdtemp(prefix="shoal-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
