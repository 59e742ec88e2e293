"""A decoder of random weights made on the device, and its pool: what the engine runs where no files are."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.sizes import Sizes
from shoal.engine.backends import choose_backend
from shoal.engine.decoder import Decoder
from shoal.engine.dtypes import torch_dtype
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv, anchor_segment, decode_segment, prefill_segments
from shoal.engine.weights import LayerWeights, ModelWeights
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout, RequestTables
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Bench:
    """Random weights, a pool for the largest case, and who owns its blocks."""

    decoder: Decoder
    pool: KvPool
    blocks: BlockPool

    @classmethod
    def make(cls, sizes: Sizes, device: torch.device) -> "Bench":
        shape = sizes.config.shape
        backend = choose_backend("auto", sizes.config, sizes.dtype, device)
        decoder = Decoder(_random_weights(sizes, device), backend, device)
        most = max(context * max(batches) for context, batches in sizes.decode)
        num_blocks = shape.num_layers * (max(most, sizes.long_length) // sizes.block_size + 2 * 64)
        pool = KvPool(shape, num_blocks, sizes.block_size, sizes.dtype, device)
        pool.data.normal_(0.0, 0.5)  # KV of requests that never ran, for decode
        return cls(decoder, pool, BlockPool(num_blocks))

    def reserve(self, policy: str, num_tokens: int, num_new: int) -> tuple[RequestTables, RequestKv]:
        """Room for a prompt and `num_new` tokens after it."""
        num_layers = self.pool.shape.num_layers
        layout = KvLayout.of(num_layers, Visibility.parse(policy).resolve(num_layers), num_tokens)
        tables = RequestTables(self.blocks, self.pool.block_size, layout)
        tables.reserve(num_tokens + num_new, layout.num_upper_slots(num_tokens + num_new))
        return tables, RequestKv.of(tables)

    def first_token(self, policy: str, num_tokens: int, chunk_tokens: int) -> None:
        """Everything between token ids and the first token: chunks of prefill, anchors, the boundary token, its scores."""
        tables, kv = self.reserve(policy, num_tokens, 1)
        ids, stop = [7 + at % 500 for at in range(num_tokens)], kv.layout.split.num_prefill_tokens
        anchors = []
        for first in range(0, stop, chunk_tokens):
            chunk = range(first, min(stop, first + chunk_tokens))
            segments = prefill_segments(kv, ids[chunk.start : chunk.stop], chunk)
            states = self.decoder.forward(segments, self.pool).run().states
            anchors += [anchor_segment(kv, kept, segments[index].positions) for index, kept in states.items()]
        last = decode_segment(kv, ids[stop:], range(stop, num_tokens))
        self.decoder.forward([*anchors, last], self.pool).run().logits.argmax(-1).tolist()
        tables.release()

    def step(self, requests: list[RequestKv], position: int) -> None:
        """One token of each request, down to its arg-max on the host."""
        segments = [decode_segment(kv, [7], range(position, position + 1)) for kv in requests]
        self.decoder.forward(segments, self.pool).run().logits.argmax(-1).tolist()


def _random_weights(sizes: Sizes, device: torch.device) -> ModelWeights:
    shape, dtype = sizes.config.shape, torch_dtype(sizes.dtype)
    width = shape.num_heads * shape.head_dim
    torch.manual_seed(0)

    def random(*dims: int) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device).normal_(0.0, dims[-1] ** -0.5)

    def norm() -> torch.Tensor:
        return torch.ones(shape.hidden_size, dtype=dtype, device=device)

    layers = {
        layer: LayerWeights(
            input_norm=norm(),
            qkv_weight=random(width + shape.kv_elements, shape.hidden_size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output_weight=random(shape.hidden_size, width),
            post_norm=norm(),
            gate_up_weight=random(2 * shape.intermediate_size, shape.hidden_size),
            down_weight=random(shape.hidden_size, shape.intermediate_size),
        )
        for layer in range(shape.num_layers)
    }
    embedding, head = random(shape.vocab_size, shape.hidden_size), random(shape.vocab_size, shape.hidden_size)
    return ModelWeights(sizes.config, embedding, layers, {}, norm(), head, shape.num_layers)
