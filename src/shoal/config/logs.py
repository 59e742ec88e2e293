"""How every Shoal process logs: one line on stderr, with the time, the level and who speaks. Never prompts, never token ids."""

import logging
import sys
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")


def configure_logging(level: str, process: str) -> None:
    """Set up the root logger of this process; `process` is its name in each line (`router`, `prefill-0`)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "ray"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
