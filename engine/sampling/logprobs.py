"""Log-probabilities of given tokens, from raw logits. Knows scores only."""

from collections.abc import Sequence
from typing import Final

import torch

from shoal.types import TokenLogprobs

_ROWS: Final = 128  # looked at together, which bounds the memory that a long prompt's scores take


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocab] float32: its token's log-probability and the best `num_top` ones beside it."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS):
        part = slice(start, start + _ROWS)
        found += _score(logits[part], token_ids[part], num_top[part])
    return found


def _score(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    scores = logits.log_softmax(-1)
    chosen = torch.tensor(token_ids, device=logits.device)
    own = scores.gather(1, chosen[:, None])[:, 0].tolist()
    best = scores.topk(min(max(num_top), logits.shape[1]), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(ids[row][:num], values[row][:num], strict=True)))
        for row, (logprob, num) in enumerate(zip(own, num_top, strict=True))
    ]
