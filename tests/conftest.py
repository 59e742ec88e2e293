"""What must be said before any test module is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run element by element on the CPU; read when it is imported
