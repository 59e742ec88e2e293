"""Shoal serves decoder-only language models with shallow prefill and deep decode."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: its core reports every goaway on stderr

__version__ = "0.1.0"
