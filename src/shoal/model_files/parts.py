"""The tensors of a decoder, by what they are for. Knows no file format."""

from enum import StrEnum


class Part(StrEnum):
    """One tensor of the model (first three) or of each layer."""

    EMBEDDING = "embedding"  # [V, h]
    FINAL_NORM = "final_norm"  # [h]
    HEAD = "head"  # [V, h]
    INPUT_NORM = "input_norm"  # [h]
    Q = "q"  # [H·d, h]
    K = "k"  # [KV·d, h]
    V = "v"  # [KV·d, h]
    Q_BIAS = "q_bias"  # [H·d]
    K_BIAS = "k_bias"  # [KV·d]
    V_BIAS = "v_bias"  # [KV·d]
    Q_NORM = "q_norm"  # [d]
    K_NORM = "k_norm"  # [d]
    OUTPUT = "output"  # [h, H·d]
    ATTENTION_NORM = "attention_norm"  # [h] behind attention (`branch_norms`)
    POST_NORM = "post_norm"  # [h] before the MLP
    GATE = "gate"  # [ffn, h]
    UP = "up"  # [ffn, h]
    DOWN = "down"  # [h, ffn]
    MLP_NORM = "mlp_norm"  # [h] behind the MLP (`branch_norms`)


NORMS = frozenset(
    {Part.FINAL_NORM, Part.INPUT_NORM, Part.Q_NORM, Part.K_NORM, Part.ATTENTION_NORM, Part.POST_NORM, Part.MLP_NORM}
)
