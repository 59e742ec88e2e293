"""What is measured: shapes, lengths, policies. Computes nothing."""

from dataclasses import dataclass

import torch

from shoal.model_files import DecoderConfig, RopeConfig
from shoal.types import DType, ModelShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """One program for a GPU, one that ends in seconds for a CPU."""

    config: DecoderConfig
    dtype: DType
    chunk_tokens: int
    policies: tuple[str, ...]  # the first is full
    prefill_lengths: tuple[int, ...]
    long_length: int  # once for each policy
    decode: tuple[tuple[int, tuple[int, ...]], ...]  # context, batch sizes
    matrix_rows: int  # of the peak's matrix product
    block_size: int = 16

    @property
    def is_real(self) -> bool:
        """Whether aims apply."""
        return self.config.shape.num_layers == 32


def _llama(shape: ModelShape) -> DecoderConfig:
    return DecoderConfig(
        shape=shape,
        architecture="llama",
        rms_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(0,),
    )


def for_device(device: torch.device) -> Sizes:
    """Llama-3.1-8B's shape on a GPU, four small layers on a CPU."""
    if device.type == "cuda":
        shape = ModelShape(
            num_layers=32,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14336,
            vocab_size=128_256,
            max_context=131_072 + 64,
        )
        return Sizes(
            config=_llama(shape),
            dtype=DType.BFLOAT16,
            chunk_tokens=8192,
            policies=("full", "speed:24", "pop:22"),
            prefill_lengths=(8192, 32_768),
            long_length=131_072,
            decode=((8192, (1, 8)), (32_768, (1, 8)), (131_072, (1, 4))),
            matrix_rows=8192,
        )
    tiny = ModelShape(
        num_layers=4,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=1000,
        max_context=1100,
    )
    return Sizes(
        config=_llama(tiny),
        dtype=DType.BFLOAT16,
        chunk_tokens=128,
        policies=("full", "speed:3", "pop:3"),
        prefill_lengths=(128, 512),
        long_length=1024,
        decode=((128, (1, 8)), (1024, (1, 4))),
        matrix_rows=512,
    )
