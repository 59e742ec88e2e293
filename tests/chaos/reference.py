"""What each question's right answer is: one process, undisturbed. Knows the engine; knows no cluster.

An answer that leaves the reference is right all the same when it does so at a near tie: when 1e-4 more on the token that was
chosen would have made the reference choose it too, and everything after it is again what the reference says (design §2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.engine.weights import HeldLayers
from shoal.model_files import open_model
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility
from tests.chaos.plan import Question

TIE = 1e-4  # on a score
_BATCH = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """What the reference says to one of a question's answers."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str


class Reference:
    """Answers by question and child. `answer_all` first; `explains` runs the model again, for the rare answer that differs."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        files = open_model(model)
        held = HeldLayers.everything(files.config.shape.num_layers)
        self._decoder = Decoder.load(files, dtype=DType.FLOAT32, held=held)[0]
        self._engine = LocalEngine(self._decoder, KvPool(self._decoder.config.shape, 60_000, 8, DType.FLOAT32))
        self.answers: dict[tuple[int, int], Answer] = {}

    def answer_all(self, questions: Sequence[Question]) -> None:
        """The right answers of all of them."""
        for first in range(0, len(questions), _BATCH):
            keys = [(i, child) for i in range(first, min(first + _BATCH, len(questions))) for child in range(questions[i].n)]
            results = self._engine.generate([_request(questions[i], child) for i, child in keys])
            self.answers |= {key: _answer(result) for key, result in zip(keys, results, strict=True)}

    def explains(self, question: Question, index: int, child: int, token_ids: Sequence[int]) -> bool:
        """Whether tokens that differ from the reference's do so only at near ties."""
        expected = self.answers[index, child].token_ids
        while tuple(token_ids) != expected[: len(token_ids)]:
            at = next((i for i, (own, right) in enumerate(zip(token_ids, expected, strict=False)) if own != right), None)
            if at is None:  # it went on where the reference had ended
                return False
            before, chosen = tuple(token_ids[:at]), token_ids[at]
            nudged = self._go_on(question, child, before, ((chosen, TIE),), 1)
            if nudged.token_ids[:1] != (chosen,):
                return False
            before = (*before, chosen)
            left = question.max_tokens - len(before)
            rest = self._go_on(question, child, before, (), left).token_ids if left else ()
            expected = (*before, *rest)
        return True

    def _go_on(
        self, question: Question, child: int, replay: tuple[int, ...], bias: tuple[tuple[int, float], ...], max_tokens: int
    ) -> LocalResult:
        request = _request(question, child)
        sampling = replace(request.sampling, logit_bias=bias, max_tokens=max_tokens)
        return self._engine.generate([replace(request, replay_token_ids=replay, sampling=sampling)])[0]


def _request(question: Question, child: int) -> LocalRequest:
    sampling = SamplingParams(
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        seed=question.seed,
        ignore_eos=question.ignore_eos,
        num_logprobs=0 if question.logprobs else None,
    )
    return LocalRequest(question.prompt_ids, Visibility.parse(question.visibility), sampling, child=child)


def _answer(result: LocalResult) -> Answer:
    return Answer(result.token_ids, tuple(token.logprob for token in result.logprobs), str(result.finish_reason))
