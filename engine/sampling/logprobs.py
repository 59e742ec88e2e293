"""Log-probabilities of given tokens, from raw logits. Knows scores only."""

from collections.abc import Sequence

import torch

from shoal.types import TokenLogprobs


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocab] float32: its token's log-probability and the best `num_top` ones beside it."""
    if not token_ids:
        return []
    scores = logits.log_softmax(-1)
    chosen = torch.tensor(token_ids, device=logits.device)
    own = scores.gather(1, chosen[:, None])[:, 0].tolist()
    most = min(max(num_top), logits.shape[1])
    best = scores.topk(most, dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(ids[row][:num], values[row][:num], strict=True)))
        for row, (logprob, num) in enumerate(zip(own, num_top, strict=True))
    ]
