"""Where torch computes here: the device and the CPU threads. Knows nothing else."""

import torch

from shoal.errors import InvalidConfig


def use(device: str, num_threads: int | None) -> None:
    """Check the device and set this process's threads. Raises InvalidConfig for a device that is not there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own words: unknown, or built without it
        raise InvalidConfig(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if num_threads is not None:
        torch.set_num_threads(num_threads)
