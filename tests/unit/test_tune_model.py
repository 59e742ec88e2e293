"""The tuner's forward pass against the plain decoder of the quality tools, span by span; gradients against autograd's own."""

import pytest
import torch
import torch.nn.functional as F

from shoal.engine.weights import HeldLayers, load_weights
from shoal.quality.torch_model import Example, TorchDecoder, make_batch
from shoal.quality.tune import attention
from shoal.quality.tune.batch import IGNORED, Span, TuneBatch, Window, make_tune_batch
from shoal.quality.tune.lora import Lora
from shoal.quality.tune.loss import distillation_loss, supervised_loss
from shoal.quality.tune.model import TunedModel
from shoal.types import DType
from shoal.visibility import Visibility
from tests import engine_support as support

VISIBILITIES = ["full", "speed:2", "speed:2:anchors=3:boundary=4", "speed:1:anchors=0", "speed:2:anchors=2:sink"]
WINDOWS = (
    Window(support.prompt(23, seed=1), (Span(3, 9), Span(9, 16), Span(16, 23))),
    Window(support.prompt(17, seed=2), (Span(5, 17),)),
    Window(support.prompt(5, seed=3), (Span(0, 5, 1),)),  # a prompt that is all boundary: no anchors
)


def make_model(variant: str, text: str, *, checkpointing: bool = False) -> tuple[TunedModel, Lora]:
    files = support.model_files(variant)
    num_layers = files.config.shape.num_layers
    weights, _ = load_weights(files, HeldLayers.everything(num_layers), dtype=DType.FLOAT32)
    model = TunedModel(weights, Visibility.parse(text).resolve(num_layers), checkpointing=checkpointing)
    return model, Lora(files.config, 1, rank=4, alpha=8.0, seed=5)


def expected_states(variant: str, text: str, window: Window, span: Span) -> torch.Tensor:
    """What the plain decoder gives the span's tokens when decode begins at the span."""
    own = TorchDecoder.load(support.model_files(variant)).eval()
    visibility = Visibility.parse(text.split(":boundary")[0] + ":boundary=1").resolve(own.num_layers)
    prompt, rest = window.ids[: span.start + 1], window.ids[span.start + 1 : span.stop]
    with torch.no_grad():
        states: torch.Tensor = own(make_batch([Example(prompt, rest)], visibility))[0]
    return states


@pytest.mark.parametrize("variant", sorted(name for name in support.VARIANTS if not name.startswith(("gemma", "qwen3-vl"))))
@pytest.mark.parametrize("text", VISIBILITIES)
def test_every_span_sees_what_decode_would_see(variant: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 7)
    model, lora = make_model(variant, text)
    batch = make_tune_batch(WINDOWS)
    passes = model.run(batch, lora, with_teacher=True)
    student = passes.student.detach().view(*batch.positions.shape, -1)
    assert passes.teacher is not None
    teacher, at = passes.teacher.view(*batch.positions.shape, -1), 0
    for window in WINDOWS:
        for span in window.spans:
            length = span.stop - span.start
            assert torch.allclose(student[at, :length], expected_states(variant, text, window, span), atol=2e-5)
            assert torch.allclose(teacher[at, :length], expected_states(variant, "full", window, span), atol=2e-5)
            at += 1


def test_targets_are_the_tokens_that_follow_and_boundary_tokens_carry_no_loss() -> None:
    batch = make_tune_batch([Window((10, 11, 12, 13, 14), (Span(1, 5, 2),)), Window((20, 21), (Span(1, 2),))])
    assert batch.positions.tolist() == [[1, 2, 3, 4], [1, 1, 1, 1]]
    assert batch.targets.tolist() == [[IGNORED, IGNORED, 14, IGNORED], [IGNORED] * 4]
    assert batch.num_tokens == 10


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_every_adapted_weight_and_no_other(checkpointing: bool) -> None:
    model, lora = make_model("qwen2-bias-mixed-windows", "speed:2", checkpointing=checkpointing)
    with torch.no_grad():
        for name, tensor in lora.parameters.items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    batch = make_tune_batch(WINDOWS)
    states = model.run(batch, lora, with_teacher=False).student
    kept, labels = (batch.targets != IGNORED).flatten(), batch.targets.flatten()
    loss = supervised_loss(states[kept], labels[kept], model.head)
    plain = F.cross_entropy(F.linear(states[kept], model.head), labels[kept])
    assert float(loss) == pytest.approx(float(plain), abs=1e-5)
    own = torch.autograd.grad(loss, list(lora), retain_graph=True)
    for got, wanted in zip(own, torch.autograd.grad(plain, list(lora)), strict=True):
        assert float(wanted.abs().sum()) > 0
        assert torch.allclose(got, wanted, atol=1e-6, rtol=1e-4)
    assert not model.head.requires_grad


def test_distillation_is_the_divergence_over_the_candidates() -> None:
    generator = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn((600, 16), generator=generator) for _ in range(2))
    head = torch.randn((40, 16), generator=generator)
    student.requires_grad_()
    loss = distillation_loss(student, teacher, head)
    targets = F.log_softmax(teacher @ head.T, -1)
    plain = F.kl_div(F.log_softmax(student @ head.T, -1), targets, reduction="batchmean", log_target=True)
    assert float(loss) == pytest.approx(float(plain), rel=1e-5)
    got, wanted = (torch.autograd.grad(value, student)[0] for value in (loss, plain))
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_batch_moves_whole() -> None:
    moved = make_tune_batch(WINDOWS).to(torch.device("cpu"))
    assert isinstance(moved, TuneBatch)
