"""The differentiable decoder gives what the engine gives, under every visibility, in padded batches; gradients arrive."""

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import InternalError, InvalidRequest
from shoal.quality.torch_model import IGNORED, Example, Gates, LayerTrace, TorchDecoder, make_batch
from shoal.types import DType
from shoal.visibility import Visibility
from tests import engine_support as support
from tests.unit.test_goldens_smollm2 import GOLDENS

CASES = [
    "full",
    "full:boundary=5",
    "speed:2",
    "speed:2:anchors=3:boundary=4",
    "speed:1:anchors=0",
    "pop:2",
    "pop:1:late:boundary=3",
]
LENGTHS = [(1, 3), (2, 4), (17, 6), (9, 1)]  # prompt and response; one prompt is all boundary


def model(variant: str = "llama") -> TorchDecoder:
    return TorchDecoder.load(support.model_files(variant)).eval()


def examples() -> list[Example]:
    return [Example(support.prompt(n, seed=1), support.prompt(m, seed=2)) for n, m in LENGTHS]


def resolved(text: str, num_layers: int = 4) -> Visibility:
    return Visibility.parse(text).resolve(num_layers)


def logprobs(own: TorchDecoder, given: list[Example], visibility: Visibility) -> list[list[float]]:
    batch = make_batch(given, visibility)
    with torch.inference_mode():
        scores = own.logits(own(batch)).log_softmax(-1)
    at = batch.targets != IGNORED
    found = scores.gather(2, batch.targets.clamp(min=0)[..., None])[..., 0]
    return [row[mask].tolist() for row, mask in zip(found, at, strict=True)]


@pytest.mark.parametrize("variant", sorted(support.VARIANTS))
@pytest.mark.parametrize("text", [*CASES, "speed:2:anchors=2:sink:boundary=2"])
def test_log_probabilities_are_the_engines(variant: str, text: str) -> None:
    visibility = resolved(text, support.model_files(variant).config.shape.num_layers)
    engine = support.engine(support.decoder(variant, backend="torch"))
    for index, example in enumerate(examples()):
        request = support.greedy(example.prompt_ids, str(visibility))
        engine.submit(str(index), type(request)(*_fields(request), continuation_ids=example.response_ids))
    results = engine.run()
    for index, own in enumerate(logprobs(model(variant), examples(), visibility)):
        expected = [token.logprob for token in results[str(index)].logprobs]
        assert own == pytest.approx(expected, abs=1e-4)


def _fields(request: object) -> tuple[object, ...]:
    return tuple(getattr(request, name) for name in ("prompt_ids", "visibility", "sampling"))


@pytest.mark.slow
def test_log_probabilities_are_the_goldens() -> None:
    own = TorchDecoder.load(support.smollm2_files()).eval()
    chosen = [case for case in GOLDENS if len(case.prompt) < 100][::4]
    assert len({Visibility.parse(case.visibility).kind for case in chosen}) == 3
    for case in chosen:
        batch = make_batch([Example(case.prompt, case.output_ids)], resolved(case.visibility, 30))
        with torch.inference_mode():
            scores = own.logits(own(batch))[0].log_softmax(-1)[batch.targets[0] != IGNORED]
        for step, top in enumerate(case.top5[: case.num_clear]):
            for token, value in top.items():
                assert abs(float(scores[step, token]) - value) < 1e-3, (case.name, step)


@pytest.mark.parametrize("text", CASES)
def test_gradients_are_the_same_with_checkpoints_and_only_shallow_where_prompts_are(text: str) -> None:
    own, grads = model(), []
    for checkpoint in (False, True):
        batch = make_batch(examples(), resolved(text))
        own.zero_grad()
        at = batch.targets != IGNORED
        F.cross_entropy(own.logits(own(batch, checkpoint=checkpoint)[at]), batch.targets[at]).backward()
        grads.append({name: parameter.grad for name, parameter in own.named_parameters()})
    assert all(grad is not None and grad.isfinite().all() for grad in grads[0].values())
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in grads[0])


def test_speed_leaves_nothing_of_the_prompt_above_k() -> None:
    seen: list[LayerTrace] = []
    model()(make_batch(examples(), resolved("speed:2:anchors=1")), trace=seen.append)
    assert [trace.keys.shape[2] - trace.decode_in.shape[1] for trace in seen] == [16, 16, 1, 1]


def test_gates_of_zero_skip_layers_for_prefill_tokens_as_pop_does() -> None:
    own, given = model(), examples()
    gate = torch.ones(len(given), 4, 2)
    gate[:, 2:] = 0
    with torch.inference_mode():
        skipped = own(make_batch(given, resolved("full")), gates=Gates(prefill=gate))
        pop = own(make_batch(given, resolved("pop:2")))
    batch = make_batch(given, resolved("pop:2"))
    at = batch.targets != IGNORED
    assert torch.allclose(skipped[at], pop[at], atol=1e-5)


def test_some_layers_make_a_smaller_model() -> None:
    own = model()
    small = own.with_layers([0, 3])
    assert small.num_layers == 2 and small.model.layers[1] is own.model.layers[3]
    assert small(make_batch(examples(), resolved("full", 2))).shape[:2] == (4, 7)


def test_bfloat16_is_near() -> None:
    own, visibility = model(), resolved("speed:2")
    with torch.autocast("cpu", torch.bfloat16):
        rough = logprobs(own, examples(), visibility)
    for row, exact in zip(rough, logprobs(own, examples(), visibility), strict=True):
        assert row == pytest.approx(exact, abs=0.2)
    assert TorchDecoder.load(support.model_files(), dtype=DType.BFLOAT16).lm_head.weight.dtype is torch.bfloat16


def test_what_cannot_be_a_batch_is_refused() -> None:
    visibility = resolved("full")
    for given, words in (([], "at least one"), ([Example((), (1,))], "empty prompt"), ([Example((1, 2), (3,))], "exceeds")):
        with pytest.raises(InvalidRequest, match=words):
            make_batch(given, visibility, max_tokens=2)
    with pytest.raises(InternalError, match="not resolved"):
        model()(make_batch(examples(), Visibility.parse("speed:9:boundary=1")))
