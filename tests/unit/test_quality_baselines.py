"""Other ways to save: each does to weights and states what its paper says."""

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import Unsupported
from shoal.quality.baselines import (
    block_influence,
    pruned_model,
    rounded_layers,
    rounded_model,
    sliced_model,
    without_least_influential,
)
from shoal.quality.baselines.copies import calibration_batch, column_norms, linears
from shoal.quality.baselines.int8 import rounded
from shoal.quality.torch_model import Example, TorchDecoder, make_batch
from tests import engine_support as support
from tests.unit.test_quality_torch_model import model, resolved


def texts() -> list[Example]:
    return [Example(support.prompt(30 + seed, seed), (5,)) for seed in range(4)]


def hidden(own: TorchDecoder, **options: object) -> torch.Tensor:
    with torch.inference_mode():
        return own(make_batch(texts(), resolved("full", own.num_layers)), **options)  # type: ignore[arg-type]


def test_shortgpt_drops_what_turns_least() -> None:
    own = model()
    for part in (own.model.layers[2].self_attn.o_proj, own.model.layers[2].mlp.down_proj):
        part.weight.data.mul_(0.01)
    influence = block_influence(own, texts())
    assert min(range(4), key=influence.__getitem__) == 2
    small, dropped = without_least_influential(own, texts(), 3)
    assert dropped == [2] and [id(layer) for layer in small.model.layers] == [id(own.model.layers[i]) for i in (0, 1, 3)]


def test_wanda_zeroes_the_lowest_of_weight_times_norm_in_each_row() -> None:
    own = model()
    before = {name: part.weight.clone() for name, part in linears(own.model.layers).items()}
    pruned = pruned_model(own, texts(), 0.5)
    norms = column_norms(own, calibration_batch(own, texts()))
    for name, part in linears(pruned.model.layers).items():
        assert torch.equal(before[name], linears(own.model.layers)[name].weight), "the model itself stays"
        zero = part.weight == 0
        assert (zero.sum(1) == zero.shape[1] // 2).all()
        scores = before[name].abs() * norms[name]
        assert (scores.masked_fill(~zero, 0).amax(1) <= scores.masked_fill(zero, torch.inf).amin(1)).all()
    assert not torch.allclose(hidden(pruned), hidden(own), atol=1e-3)


def test_norms_are_of_what_enters() -> None:
    own = model()
    batch = calibration_batch(own, texts())
    with torch.inference_mode():
        ids = torch.cat([batch.prefill_ids, batch.decode_ids], 1)
        entering = own.model.layers[0].input_layernorm(own.model.embed_tokens(ids)).flatten(0, 1)
    assert torch.allclose(column_norms(own, batch)["0.self_attn.q_proj"], entering.norm(dim=0), rtol=1e-4)


def test_slicegpt_with_nothing_sliced_is_the_model_and_loses_more_the_more_is_sliced() -> None:
    own = model()
    assert torch.allclose(hidden(sliced_model(own, texts(), 0.0)), hidden(own), atol=1e-3)
    lost = [
        float(1 - F.cosine_similarity(hidden(sliced_model(own, texts(), share)), hidden(own), dim=-1).mean())
        for share in (0.1, 0.5)
    ]
    assert 0 < lost[0] < lost[1]
    with pytest.raises(Unsupported, match="norms behind"):
        sliced_model(model("gemma3-window"), texts(), 0.1)


def test_slicegpt_is_what_sliced_weights_compute() -> None:
    """The first layer by hand: weights cut to the kept components, the norm divided by the full width."""
    own = model()
    sliced = sliced_model(own, texts(), 0.25)
    layer = sliced.model.layers[0]
    start, middle = sliced.model.embed_tokens[1].basis, layer.middle.basis  # type: ignore[index]
    assert start.shape == (64, 48)
    ids = make_batch(texts()[:1], resolved("full")).prefill_ids
    with torch.inference_mode():
        narrow = own.model.embed_tokens(ids) @ start  # [1, n, 48]: what a sliced model holds
        scale = torch.rsqrt(narrow.square().sum(-1, keepdim=True) / 64 + 1e-5)
        cut = (own.model.layers[0].input_layernorm.weight[:, None] * start).T  # norm's scale fused, input side cut
        values = (narrow * scale) @ cut @ own.model.layers[0].self_attn.v_proj.weight.T
        wide = layer.self_attn.v_proj(layer.input_layernorm(narrow @ start.T))
    assert torch.allclose(values, wide, atol=1e-4) and middle.shape == (64, 48)


def test_int8_rounds_rows_and_stays_near() -> None:
    x = torch.randn(5, 40)
    near = rounded(x)
    assert (near - x).abs().max() <= x.abs().max() / 127 / 2 + 1e-6
    assert all(len(row.unique()) <= 255 for row in near)
    own = model()
    for activations in (False, True):
        lost = 1 - F.cosine_similarity(hidden(rounded_model(own, activations=activations)), hidden(own), dim=-1)
        assert 0 < float(lost.max()) < 0.02


def test_int8_for_prefill_leaves_decode_alone() -> None:
    own = model()
    layers = rounded_layers(own, activations=False)
    only_decode = [Example(support.prompt(1), support.prompt(6))]
    batch = make_batch(only_decode, resolved("full"))
    with torch.inference_mode():
        assert torch.equal(own(batch, prefill_layers=layers), own(batch)), "no prefill token, no difference"
    assert not torch.equal(hidden(own, prefill_layers=layers), hidden(own))
    with pytest.raises(AttributeError):
        _ = own.model.layers[0].self_attn.q_proj.activations  # the model itself keeps its linear maps
