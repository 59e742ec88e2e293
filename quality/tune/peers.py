"""The processes that tune together, each on its own share of every step: gradients are averaged. Knows no model."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Peers:
    """This process's place among them. One process alone has rank 0 of 1 and no group."""

    rank: int = 0
    num_processes: int = 1

    @property
    def is_first(self) -> bool:
        """The one that writes and reports."""
        return self.rank == 0

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in one message."""
        if self.num_processes == 1:
            return
        listed = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in listed])
        dist.all_reduce(flat)
        flat /= self.num_processes
        for tensor, mean in zip(listed, torch.split(flat, [tensor.numel() for tensor in listed]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def as_first_says(self, *answers: bool) -> list[bool]:
        """The first process's answers, in all: what each would decide by its own clock, they must do together or not at all."""
        if self.num_processes == 1:
            return list(answers)
        said = torch.tensor(answers, dtype=torch.uint8, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.broadcast(said, 0)
        return [bool(answer) for answer in said.tolist()]

    def wait(self) -> None:
        """Until all are here."""
        if self.num_processes > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.num_processes > 1:
            dist.destroy_process_group()


def join_peers(device: torch.device) -> Peers:
    """As torchrun's environment says (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); alone without it. Raises InvalidConfig."""
    try:
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise InvalidConfig(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}; start the processes with torchrun") from None
    if num_processes <= 1:
        return Peers()
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        raise InvalidConfig(f"cannot join {num_processes} processes: {error}; start them with torchrun") from error
    return Peers(dist.get_rank(), num_processes)
