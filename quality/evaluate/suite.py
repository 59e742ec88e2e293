"""The tasks of `shoal eval`, each over the same list of visibilities. Knows models and data; prints nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.engine.decoder import Decoder
from shoal.errors import InvalidConfig
from shoal.model_files import ModelFiles, PromptEncoder, Tokenizer, load_tokenizer
from shoal.quality.baselines import (
    layers_of,
    pruned_model,
    rounded_layers,
    rounded_model,
    sliced_model,
    without_least_influential,
)
from shoal.quality.data import LoadedData, shipped_records
from shoal.quality.evaluate.choices import is_right, load_questions, prompt
from shoal.quality.evaluate.generation import engine_decoder, generate
from shoal.quality.evaluate.humaneval import problems
from shoal.quality.evaluate.loops import distinct_share, ends_in_loop
from shoal.quality.evaluate.needle import is_found, make_needles
from shoal.quality.evaluate.sandbox import runs_well
from shoal.quality.evaluate.scores import Scorer, Scores, Subject
from shoal.quality.torch_model import Example, TorchDecoder
from shoal.visibility import Visibility, VisibilityKind

Progress = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(frozen=True, slots=True)
class LoopRate:
    """Greedy answers under one visibility."""

    visibility: str
    num_answers: int
    num_looping: int  # ended in a loop
    distinct: float  # mean share of distinct runs of four tokens
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class NeedleScore:
    """One cell of the grid."""

    visibility: str
    num_tokens: int
    depth: float
    num_prompts: int
    num_found: int


@dataclass(frozen=True, slots=True)
class CodeScore:
    """HumanEval, greedy, one attempt each."""

    visibility: str
    num_problems: int
    num_passed: int


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Multiple-choice questions under one visibility."""

    visibility: str
    num_questions: int
    num_right: int
    num_as_full: int  # right or wrong as full depth is
    error: float  # standard error of the share that is right


class Suite:
    """One model and its data. Every method is a task."""

    def __init__(
        self,
        files: ModelFiles,
        model: TorchDecoder,
        data: LoadedData,
        *,
        tuned: TorchDecoder | None = None,
        batch_size: int = 4,
        progress: Progress | None = None,
    ) -> None:
        """`tuned`: the model with an adapter, which everything but `full` and the baselines is measured with."""
        self._files, self._model, self._data = files, model, data
        self._tuned = tuned or model
        self._batch_size, self._progress = batch_size, progress or (lambda what, done, total: None)
        self._tokenizer: Tokenizer = load_tokenizer(files)
        self._decoders: dict[bool, Decoder] = {}  # by whether it is for `full`

    def resolve(self, text: str, boundary_tokens: int | None = None) -> Visibility:
        """A visibility of this model; `boundary_tokens` is the default for `speed`, the data's unless given."""
        default = self._data.boundary_tokens if boundary_tokens is None else boundary_tokens
        return Visibility.parse(text).resolve(self._model.num_layers, default)

    def perplexity(self, texts: Sequence[str]) -> list[Scores]:
        """Full depth and every visibility."""
        subjects = [Subject(text, self._tuned, self.resolve(text)) for text in texts if text != "full"]
        return self._score(subjects)

    def baselines(self, depth: int, calibration: Sequence[Example]) -> list[Scores]:
        """Shallow prefill at K = `depth` beside other methods that save the share (L − K) / L, and 8-bit prefill.

        `calibration`: what the methods that look at data look at; other texts than those that are scored.
        """
        model, num_layers = self._model, self._model.num_layers
        if not 1 <= depth < num_layers:
            raise InvalidConfig(f"baselines need a depth in 1…{num_layers - 1}, not {depth}")
        share, full = (num_layers - depth) / num_layers, Visibility(VisibilityKind.FULL, boundary_tokens=1)
        tell = self._progress
        tell("preparing baselines", 0, 5)
        few, dropped = without_least_influential(model, calibration, depth)
        subjects = [Subject(text, model, self.resolve(text)) for text in (f"pop:{depth}", f"speed:{depth}")]
        subjects.append(Subject(f"ShortGPT, both phases, without {_ranges(dropped)}", few, full))
        last = model.with_layers(range(depth))
        subjects.append(Subject(f"last {num_layers - depth} layers dropped, both phases", last, full))
        tell("preparing SliceGPT", 1, 5)
        if not model.config.branch_norms:  # Gemma cannot be sliced
            sliced = sliced_model(model, calibration, share)
            subjects.append(Subject(f"SliceGPT: {share:.0%} of the width, both phases", sliced, full))
        tell("preparing Wanda", 2, 5)
        pruned = pruned_model(model, calibration, share)
        subjects.append(Subject(f"Wanda: {share:.0%} of the weights zero, both phases", pruned, full))
        tell("preparing int8", 3, 5)
        weights, whole = rounded_layers(model, activations=False), rounded_model(model, activations=True)
        both = layers_of(whole)
        subjects.append(Subject("int8 weights in prefill", model, full, weights))
        subjects.append(Subject("int8 weights and activations in prefill", model, full, both))
        subjects.append(Subject("int8 weights and activations, both phases", whole, full))
        pop = self.resolve(f"pop:{depth}")
        subjects.append(Subject(f"pop:{depth}, int8 weights and activations in prefill", model, pop, both))
        return self._score(subjects)

    def loops(self, texts: Sequence[str], num_answers: int, max_tokens: int) -> list[LoopRate]:
        """Greedy answers to the data's prompts."""
        prompts = [example.prompt_ids for example in self._data.examples[:num_answers]]
        rates = []
        for text in texts:
            answers = self._answers(text, prompts, max_tokens, f"answers under {text}", self._data.boundary_tokens)
            looping = sum(ends_in_loop(answer) for answer in answers)
            distinct = sum(distinct_share(answer) for answer in answers) / len(answers)
            rates.append(LoopRate(text, len(answers), looping, distinct, sum(map(len, answers)) / len(answers)))
        return rates

    def needles(
        self, texts: Sequence[str], lengths: Sequence[int], depths: Sequence[float], per_cell: int, seed: int = 0
    ) -> list[NeedleScore]:
        """Whether greedy answers name the hidden number."""
        records = shipped_records("python-topics")
        needles = make_needles(records, self._tokenizer, lengths, depths, per_cell=per_cell, seed=seed)
        encoder = PromptEncoder(self._tokenizer)
        boundary = encoder.num_generation_tokens if encoder.has_chat_template else 1
        scores = []
        for text in texts:
            answers = self._answers(text, [needle.prompt_ids for needle in needles], 24, f"needles under {text}", boundary)
            found = [is_found(n, self._tokenizer.decode(a)) for n, a in zip(needles, answers, strict=True)]
            for start in range(0, len(needles), per_cell):
                cell = needles[start]
                num_found = sum(found[start : start + per_cell])
                scores.append(NeedleScore(text, cell.num_tokens, cell.depth, per_cell, num_found))
        return scores

    def humaneval(self, texts: Sequence[str], limit: int, max_tokens: int = 192) -> list[CodeScore]:
        """Completes functions and RUNS them (sandbox.py)."""
        tasks = problems(limit)
        prompts = [tuple(self._tokenizer.encode(task.prompt)) for task in tasks]
        scores = []
        for text in texts:
            answers = self._answers(text, prompts, max_tokens, f"functions under {text}", 1)
            programs = [t.program(self._tokenizer.decode(a)) for t, a in zip(tasks, answers, strict=True)]
            scores.append(CodeScore(text, len(tasks), sum(runs_well(program) for program in programs)))
        return scores

    def choices(self, texts: Sequence[str], source: str, limit: int, num_shots: int) -> list[ChoiceScore]:
        """Accuracy in OLMES's cloze form. `full` comes first."""
        everyone, asked = load_questions(source), load_questions(source, limit)
        encoder = PromptEncoder(self._tokenizer)
        examples: list[Example] = []
        for question in asked:
            text = prompt(question, everyone, num_shots)
            ids = encoder.encode_text(text).token_ids
            examples += [Example(ids, encoder.encode_continuation(text, ids, f" {choice}")) for choice in question.choices]
        longest = max(example.num_tokens for example in examples)
        if longest > (most := self._files.config.shape.max_context):
            raise InvalidConfig(f"a question of {longest} tokens exceeds the model's context of {most}; use fewer --shots")
        others = [text for text in texts if text != "full"]
        subjects = [Subject(text, self._tuned, self.resolve(text, 1)) for text in others]
        losses = Scorer(self._model, examples, batch_size=4 * self._batch_size).losses(subjects, self._progress)
        scores: list[ChoiceScore] = []
        reference: list[bool] = []
        for text, own in zip(["full", *others], losses, strict=True):
            right, start = [], 0
            for question in asked:
                right.append(is_right(question, own[start : start + len(question.choices)]))
                start += len(question.choices)
            reference = reference or right
            share = sum(right) / len(right)
            same = sum(a == b for a, b in zip(right, reference, strict=True))
            error = (share * (1 - share) / len(right)) ** 0.5
            scores.append(ChoiceScore(text, len(asked), sum(right), same, error))
        return scores

    def _answers(
        self, text: str, prompts: Sequence[tuple[int, ...]], max_tokens: int, what: str, boundary_tokens: int
    ) -> list[tuple[int, ...]]:
        is_full = text == "full" or self._tuned is self._model
        if is_full not in self._decoders:
            self._decoders[is_full] = engine_decoder(self._model if is_full else self._tuned)
        decoder, visibility = self._decoders[is_full], self.resolve(text, boundary_tokens)
        return generate(decoder, prompts, visibility, max_tokens, lambda done, total: self._progress(what, done, total))

    def _score(self, subjects: Sequence[Subject]) -> list[Scores]:
        return Scorer(self._model, self._data.examples, batch_size=self._batch_size).score(subjects, self._progress)


def _ranges(layers: Sequence[int]) -> str:
    """[3, 4, 5, 9] → "3–5, 9"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
