"""Seconds of work that is queued on a device."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall time of one run, from an idle device to an idle device."""
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of `repeats` runs, after one that is not counted."""
    run()
    return statistics.median(seconds(run, device) for _ in range(repeats))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
