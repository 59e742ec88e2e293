"""One answer of a request: its tokens, and all that sampling must know of them. Knows no transport and no tensors."""

from shoal.decode_worker.output import Finish
from shoal.decode_worker.spec import ChildSpec
from shoal.engine.sampling import ConstraintMaker, SampleRow, TokenConstraint, TokenCounts


class Child:
    """One of a request's n answers. What it samples is keyed by its index, so it draws the same alone or beside others."""

    def __init__(self, spec: ChildSpec, attempt_id: str, num_prompt_tokens: int, counts: TokenCounts | None) -> None:
        """`counts` are of the prompt, where penalties ask for them; what was replayed is counted here."""
        self.spec = spec
        self.key = f"{attempt_id}/{spec.index}"
        self.answer_ids = list(spec.replay_ids)  # then the sampled ones
        self.num_sampled = 0
        self.num_run = 0  # tokens of its sequence, from the prompt's first on, that have KV
        self.finish: Finish | None = None  # once it is over
        self._num_prompt_tokens = num_prompt_tokens
        self._counts = counts
        self._constraint: TokenConstraint | None = None
        if counts is not None:
            for token_id in spec.replay_ids:
                counts.add(token_id)

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def num_known_tokens(self) -> int:
        """Prompt, replayed and sampled tokens."""
        return self._num_prompt_tokens + len(self.answer_ids)

    @property
    def num_tokens_to_run(self) -> int:
        """Answer tokens it may yet run; the last one is never run."""
        if self.finish is not None:
            return 0
        num_left = self.spec.sampling.max_tokens - self.num_sampled
        return num_left if self.num_sampled else num_left + len(self.spec.replay_ids) - 1

    def constrain(self, make: ConstraintMaker) -> None:
        """Hold the answer to its constraint, from where the replayed tokens left it. May take long: not on the event loop."""
        if self.spec.sampling.constraint is not None:
            self._constraint = make(self.spec.sampling.constraint, self.spec.sampling.stop_token_ids)
            for token_id in self.spec.replay_ids:
                self._constraint.accept(token_id)
            self._constraint.catch_up()

    @property
    def failure(self) -> str | None:
        """Why the answer's constraint can be followed no further."""
        return self._constraint.failure if self._constraint is not None else None

    @property
    def is_complete(self) -> bool:
        """Whether the answer's constraint lets nothing follow."""
        return self._constraint is not None and self._constraint.is_complete

    def sample_row(self) -> SampleRow:
        """How to draw the next token."""
        return SampleRow(self.spec.sampling, self.index, self.num_known_tokens, self.num_sampled, self._counts, self._constraint)

    def take(self, token_id: int) -> None:
        """The answer goes on with this token."""
        self.answer_ids.append(token_id)
        self.num_sampled += 1
        if self._counts is not None:
            self._counts.add(token_id)
        if self._constraint is not None:
            self._constraint.accept(token_id)
