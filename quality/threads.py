"""How many CPU threads torch uses here. Knows nothing else."""

import torch


def use(num_threads: int) -> None:
    """Set it for this process."""
    torch.set_num_threads(num_threads)
