"""Prompts and responses as two padded streams: prefill tokens and decode tokens (design §2). Knows no weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from shoal.errors import InvalidRequest
from shoal.visibility import Visibility

IGNORED: Final = -100  # a target that carries no loss, as torch's cross_entropy takes it


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the response that followed it. The prompt has at least one token; the response may be empty."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples under one visibility. P is the longest prefill part, D the longest decode part; both are padded on the
    right with token 0, and padding is never seen by a token that counts."""

    visibility: Visibility  # resolved
    prefill_ids: Tensor  # [B, P] int64
    num_prefill: Tensor  # [B]
    num_anchors: Tensor  # [B], 0 unless `speed`
    decode_ids: Tensor  # [B, D]: the boundary tokens, then the response
    num_decode: Tensor  # [B]
    targets: Tensor  # [B, D] the response token after each decode token; IGNORED where the next is prompt or nothing

    @property
    def decode_positions(self) -> Tensor:
        """[B, D] in the sequence; padding goes on counting."""
        return self.num_prefill[:, None] + torch.arange(self.decode_ids.shape[1], device=self.decode_ids.device)

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        names = ("prefill_ids", "num_prefill", "num_anchors", "decode_ids", "num_decode", "targets")
        return type(self)(self.visibility, *(getattr(self, name).to(device) for name in names))


def make_batch(examples: Sequence[Example], visibility: Visibility, *, max_tokens: int | None = None) -> Batch:
    """Split and pad examples by a resolved visibility.

    Raises InvalidRequest for no example, an empty prompt, or an example longer than `max_tokens` (the model's context).
    """
    if not examples:
        raise InvalidRequest("a batch needs at least one example")
    for example in examples:
        if not example.prompt_ids:
            raise InvalidRequest("an example has an empty prompt; a prompt needs at least one token")
        if max_tokens is not None and example.num_tokens > max_tokens:
            raise InvalidRequest(
                f"an example of {example.num_tokens} tokens exceeds the context of {max_tokens}; shorten its prompt or response"
            )
    splits = [visibility.split(len(example.prompt_ids)) for example in examples]
    prefill, decode, targets = [], [], []
    for example, split in zip(examples, splits, strict=True):
        boundary = example.prompt_ids[split.num_prefill_tokens :]
        prefill.append(example.prompt_ids[: split.num_prefill_tokens])
        decode.append((*boundary, *example.response_ids))
        targets.append((*[IGNORED] * (len(boundary) - 1), *example.response_ids, IGNORED))
    return Batch(
        visibility,
        _padded(prefill, 0),
        torch.tensor([split.num_prefill_tokens for split in splits]),
        torch.tensor([split.num_anchor_tokens for split in splits]),
        _padded(decode, 0),
        torch.tensor([len(ids) for ids in decode]),
        _padded(targets, IGNORED),
    )


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)
