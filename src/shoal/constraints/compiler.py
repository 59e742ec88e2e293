"""Compiles constraints for one model's vocabulary and remembers the last ones. Knows tokenizers; knows no request.

Compiling takes from under a millisecond to a few seconds: not for an event loop, and only for what has been vetted. What a step
may cost is bounded by llguidance's own limits.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shoal.constraints.deep_stack import on_deep_stack
from shoal.constraints.grammar import field_name, grammar_of
from shoal.constraints.matcher import AnswerConstraint, reason
from shoal.errors import InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files import Tokenizer
from shoal.types import Constraint

_MAX_REMEMBERED: Final = 32
_LIMITS: Final = LLParserLimits(
    max_lexer_states=20_000,  # 1 to 2 kB each
    max_items_in_row=500,  # of these three, what one token of an answer may cost: some ten milliseconds
    step_max_items=5_000,
    step_lexer_fuel=100_000,
    verbose_errors=False,
)


class ConstraintCompiler:
    """Thread-safe. The tokenizer is loaded at the first use."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_ids: Collection[int],
        *,
        max_remembered: int = _MAX_REMEMBERED,
    ) -> None:
        """`vocab_size` is the model's own, which may be padded beyond the tokenizer's."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._max_remembered = max_remembered
        self._vocabulary: LLTokenizer | None = None
        self._remembered: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._looking = threading.Lock()
        self._compiling = threading.Lock()
        self.num_compiled = 0

    def knows(self, constraint: Constraint) -> bool:
        """Whether it is remembered."""
        with self._looking:
            return constraint in self._remembered

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest with the field and the grammar's own message when no answer can be held to it."""
        self._compiled(constraint)

    def make(self, constraint: Constraint, stop_ids: Collection[int]) -> AnswerConstraint:
        """A fresh constraint for one answer, which ends with any of `stop_ids`. Raises InvalidRequest as `check` does."""
        return AnswerConstraint(self._compiled(constraint).deep_copy(), self._eos_ids, stop_ids)

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        found = self._find(constraint)
        if found is not None:
            return found
        with self._compiling:  # one at a time: equal ones compile once, and many cannot take every core
            found = self._find(constraint)
            if found is None:
                found = self._compile(constraint)
                with self._looking:
                    self._remembered[constraint] = found
                    while len(self._remembered) > self._max_remembered:
                        self._remembered.popitem(last=False)
        return found

    def _find(self, constraint: Constraint) -> LLMatcher | None:
        with self._looking:
            if constraint in self._remembered:
                self._remembered.move_to_end(constraint)
            return self._remembered.get(constraint)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        grammar = grammar_of(constraint)
        vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary()
        self.num_compiled += 1

        def compile_and_begin() -> tuple[LLMatcher, LLMatcher]:
            made = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
            begun = made.deep_copy()
            begun.compute_bitmask()  # shows whether any answer can begin
            return made, begun

        made, begun = on_deep_stack(compile_and_begin)
        if made.is_error():
            raise InvalidRequest(f"{field_name(constraint)}: {reason(made)}")
        if begun.is_error():
            raise InvalidRequest(f"{field_name(constraint)}: no answer can match it with this model's tokens ({reason(begun)})")
        return made

    def _read_vocabulary(self) -> LLTokenizer:
        try:
            tokenizer = self._load_tokenizer()
        except InvalidConfig as error:
            raise Unsupported(f"answers cannot be held to a constraint without the model's tokenizer: {error}") from error
        return LLTokenizer(tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=list(self._eos_ids))
