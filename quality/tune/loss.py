"""Losses whose gradient is made beside their value, row block by row block, so that no scores of all rows exist at once."""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS: Final = 256  # of scores at once


class _HeadLoss(torch.autograd.Function):
    """Mean over rows of a loss on the scores `hidden · headᵀ`, and its gradient for `hidden`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        """hidden [R, h]; head [V, h]; target: the teacher's hidden states [R, h], or labels [R]."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        gradients = []
        for rows, wanted in zip(torch.split(hidden, _ROWS), torch.split(target, _ROWS), strict=True):
            scores = F.log_softmax(F.linear(rows, head).float(), dim=-1)
            if wanted.dim() == 2:
                teacher = F.log_softmax(F.linear(wanted, head).float(), dim=-1)
                shares = teacher.exp()
                total += (shares * (teacher - scores)).sum(dtype=torch.float64)
                slope = scores.exp_().sub_(shares)
            else:
                total -= scores.gather(1, wanted[:, None]).sum(dtype=torch.float64)
                slope = scores.exp_()
                slope.scatter_add_(1, wanted[:, None], torch.full_like(wanted[:, None], -1, dtype=slope.dtype))
            gradients.append(slope.to(head.dtype) @ head)
        ctx.save_for_backward(torch.cat(gradients) / len(hidden))
        return (total / len(hidden)).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


def distillation_loss(student: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
    """Mean KL(teacher ‖ student) over the tokens whose rows `head` holds. Both [R, h], normed."""
    loss: Tensor = _HeadLoss.apply(student, head, teacher)  # type: ignore[no-untyped-call]
    return loss


def supervised_loss(student: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    """Mean cross-entropy of labels [R] over the whole vocabulary."""
    loss: Tensor = _HeadLoss.apply(student, head, labels)  # type: ignore[no-untyped-call]
    return loss
