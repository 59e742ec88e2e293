"""From arrivals and lengths to prompts: scaled and clipped to a model, with prefixes shared. Knows no service.

A prompt is a list of pieces of named token streams; two prompts share a prefix as far as their pieces agree. Tokens are drawn
from a seed, so the same seed asks the same, and another seed shares nothing with it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.errors import InvalidConfig
from shoal.simulator.workload.requests import SimRequest


@dataclass(frozen=True, slots=True)
class Fit:
    """How lengths are made to suit a model. Tokens.

    Prompt and answer together stay within `context`: the answer keeps half of it at most, the prompt's end is cut.
    """

    context: int
    scale: float = 1.0  # of a trace's prompts, answers and shared blocks
    system_tokens: int = 0  # the same before every prompt
    turns: int = 1  # requests of one conversation: each repeats the prompts before it

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise InvalidConfig(f"--scale-lengths {self.scale:g} must be more than zero")
        if self.turns < 1 or self.system_tokens < 0:
            raise InvalidConfig("--turns must be at least 1, --system-tokens 0 or more")
        if not self.system_tokens < self.context - 2:
            raise InvalidConfig(f"--system-tokens {self.system_tokens} leaves no room in a context of {self.context} tokens")


@dataclass(frozen=True, slots=True)
class Clipped:
    """What the model's context cost a workload."""

    num_requests: int
    num_prompts: int  # cut
    num_answers: int  # cut
    lost_share: float  # of all tokens

    def words(self) -> str:
        """One line, "" when nothing was cut."""
        if not self.num_prompts and not self.num_answers:
            return ""
        return (
            f"to fit the context, {self.num_prompts} prompts and {self.num_answers} answers of {self.num_requests} requests were "
            f"cut: {100 * self.lost_share:.1f}% of all tokens; scale lengths down to keep their proportions"
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Pieces: (name of a token stream, how many tokens of it)."""

    arrival_s: float
    pieces: tuple[tuple[str, int], ...]
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    def token_ids(self, seed: str, vocab_size: int) -> list[int]:
        """The prompt."""
        return [token_id for name, count in self.pieces for token_id in _stream(f"{seed}/{name}", count, vocab_size)]


def plan(requests: Sequence[SimRequest], fit: Fit) -> tuple[list[Ask], Clipped]:
    """All requests as they will be sent, and what was cut."""
    asks = list(_whole(requests, fit))
    kept = [_clipped(ask, fit.context) for ask in asks]
    pairs = list(zip(asks, kept, strict=True))
    lost = sum(_num_tokens(ask) - _num_tokens(cut) for ask, cut in pairs)
    return kept, Clipped(
        len(asks),
        sum(ask.pieces != cut.pieces for ask, cut in pairs),
        sum(ask.max_tokens != cut.max_tokens for ask, cut in pairs),
        lost / max(1, sum(map(_num_tokens, asks))),
    )


def _whole(requests: Sequence[SimRequest], fit: Fit) -> Iterator[Ask]:
    num_conversations = -(-len(requests) // fit.turns)
    said = [0] * num_conversations  # tokens of each conversation so far
    for index, request in enumerate(requests):
        num_prompt, num_answer = (max(1, round(fit.scale * n)) for n in (request.num_prompt_tokens, request.num_output_tokens))
        pieces = [("system", fit.system_tokens)] if fit.system_tokens else []
        if fit.turns > 1:
            talk = index % num_conversations
            said[talk] += num_prompt
            pieces.append((f"talk/{talk}", said[talk]))
        else:
            pieces += _blocks(request, num_prompt, max(1, round(fit.scale * request.hash_tokens)))
            own = num_prompt - sum(count for name, count in pieces if name != "system")
            pieces += [(f"own/{index}", own)] if own else []
        yield Ask(request.arrival_s, tuple(pieces), num_answer)


def _blocks(request: SimRequest, num_prompt: int, num_block: int) -> Iterator[tuple[str, int]]:
    """The trace's named blocks, as many tokens as the prompt has."""
    for name in request.prefix_hashes:
        if num_prompt <= 0:
            return
        yield f"block/{name}", min(num_block, num_prompt)
        num_prompt -= num_block


def _clipped(ask: Ask, context: int) -> Ask:
    max_tokens = min(ask.max_tokens, context // 2)
    room, pieces = context - max_tokens, []
    for name, count in ask.pieces:
        if room > 0:
            pieces.append((name, min(count, room)))
            room -= count
    return replace(ask, pieces=tuple(pieces), max_tokens=max_tokens)


def _num_tokens(ask: Ask) -> int:
    return ask.num_prompt_tokens + ask.max_tokens


def _stream(name: str, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(vocab_size) for _ in range(count)]
