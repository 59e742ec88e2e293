"""Visibility as masks: transformers' decoder layers, run one by one over whole sequences, without any cache.

Every step recomputes everything. Lower layers run all tokens. In upper layers `speed` keeps the rows of anchors and decode
tokens; `pop` feeds the prefill tokens' hidden state after layer K−1 into every upper layer and throws their output away.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Case:
    kind: str  # full, speed, pop
    depth: int | None = None  # K
    anchors: int = 0
    boundary: int = 1
    late: bool = False  # where the projection runs, not what it gives
    sink: bool = False

    @property
    def text(self) -> str:
        """Shoal's text form."""
        parts = [self.kind] if self.depth is None else [self.kind, str(self.depth)]
        parts += [f"anchors={self.anchors}"] if self.kind == "speed" else []
        parts += ["sink"] if self.sink else []
        parts += ["late"] if self.late else []
        return ":".join([*parts, f"boundary={self.boundary}"])


class MaskOracle:
    """`model` must use eager attention, so that the mask given here is the mask applied."""

    def __init__(self, model: PreTrainedModel) -> None:
        assert model.config._attn_implementation == "eager"
        self.model = model.eval()

    @torch.inference_mode()
    def scores(self, token_ids: list[int], num_prompt: int, case: Case) -> torch.Tensor:
        """Log-probabilities [decode tokens, vocab] after each decode token: boundary tokens, then generated ones."""
        num_layers = len(self.model.model.layers)
        depth = num_layers if case.depth is None else case.depth
        total = len(token_ids)
        num_prefill = max(0, num_prompt - case.boundary)
        num_anchors = min(case.anchors, num_prefill) if case.kind == "speed" else 0

        hidden = self._embed(token_ids)
        everyone = torch.arange(total)
        for layer in range(depth):
            hidden = self._layer(layer, hidden, everyone, 0)
        decode = hidden[:, num_prefill:]
        if case.kind == "speed" and depth < num_layers:
            seen = torch.cat([everyone[:num_anchors], everyone[num_prefill:]])
            rows = hidden[:, seen]
            for layer in range(depth, num_layers):
                rows = self._layer(layer, rows, seen, num_anchors if case.sink else 0)
            decode = rows[:, num_anchors:]
        elif depth < num_layers:
            frozen = hidden[:, :num_prefill]
            for layer in range(depth, num_layers):
                decode = self._layer(layer, torch.cat([frozen, decode], dim=1), everyone, 0)[:, num_prefill:]
        logits = self.model.lm_head(self.model.model.norm(decode))[0].float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)

    def greedy(self, prompt: list[int], case: Case, num_tokens: int, stop: frozenset[int] = frozenset()) -> "Greedy":
        """Generate greedily, recomputing the whole sequence for every token."""
        ids, steps = list(prompt), []
        for _ in range(num_tokens):
            scores = self.scores(ids, len(prompt), case)[-1]
            values, best = scores.topk(5)
            steps.append([[i, v] for i, v in zip(best.tolist(), values.tolist(), strict=True)])
            ids.append(int(best[0]))
            if ids[-1] in stop:
                break
        return Greedy(ids[len(prompt) :], steps)

    def _layer(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, num_sinks: int) -> torch.Tensor:
        """One decoder layer over rows at `positions`, causal, within the layer's sliding window."""
        distance = positions[:, None] - positions[None, :]
        hidden_from = (distance < 0) & ~self._see_each_other(positions)
        window = self._window(layer)
        if window is not None:
            hidden_from = hidden_from | ((distance >= window) & (torch.arange(len(positions))[None, :] >= num_sinks))
        mask = torch.zeros(hidden_from.shape).masked_fill(hidden_from, float("-inf"))
        kinds = {"layer_type": self.model.config.layer_types[layer]} if self.model.config.model_type == "gemma3_text" else {}
        rotary = self.model.model.rotary_emb(hidden, position_ids=self._turned(positions), **kinds)
        return self.model.model.layers[layer](hidden, attention_mask=mask[None, None], position_embeddings=rotary)

    def _embed(self, token_ids: list[int]) -> torch.Tensor:
        embedded: torch.Tensor = self.model.model.embed_tokens(torch.tensor([token_ids]))
        return embedded

    def _see_each_other(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows [n, n] of which the first sees the second even where that comes later: images' business."""
        return torch.zeros(len(positions), len(positions), dtype=torch.bool)

    def _turned(self, positions: torch.Tensor) -> torch.Tensor:
        """What rotary embeddings turn rows by: [1, n]."""
        return positions[None]

    def _window(self, layer: int) -> int | None:
        config = self.model.config
        types = getattr(config, "layer_types", None)
        if types is not None and types[layer] != "sliding_attention":
            return None
        if types is None and config.model_type != "mistral":
            return None
        window: int | None = config.sliding_window
        return window


@dataclass(frozen=True)
class Greedy:
    token_ids: list[int]
    top5: list[list[list[float]]]  # per step, [token id, log-probability], best first

    @property
    def num_clear_steps(self) -> int:
        """Steps before the first in which the top two lie within 1e-4, from where on any token may follow."""
        for step, top in enumerate(self.top5):
            if top[0][1] - top[1][1] < 1e-4:
                return step
        return len(self.top5)
