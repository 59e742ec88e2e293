"""Which tokens run in the next step. Knows counts of tokens and the order of arrival; knows no tensors, blocks or clock.

Progress is a count that catches up: a request has `num_known` tokens, of which `num_computed` have been run. Prompt chunks,
cached prefixes, transferred KV, replayed tokens and generated tokens are all the same arithmetic on these two numbers.

The rule of a step, which starves nobody:

1. One-token decode rows come first, in arrival order. When not all fit, those that ran (or arrived) longest ago go first.
2. While longer chunks wait, rows leave them `min_chunk_tokens` of the budget (half of it when the budget is small) and one
   place in the step. Where the step has room for one of the two only, rows and chunks take turns.
3. The first of the waiting chunks gets all it needs when that ends its piece in this step, else at least half of what is left.
   First is the earliest arrival of the highest rank there; but in every fourth step that lets it pass others, the earliest of
   all. So a long prompt progresses steadily, whatever arrives after it.
4. The rest goes to the highest rank's pieces with the fewest tokens left, ties by arrival. So short prompts pass a long one by.
5. What is then still left goes back to the first. Chunks are listed in arrival order, each request at most once.
6. Tokens that see each other (an image of some models) run in one chunk: a chunk that would end among them ends before them.
   Where that leaves the first nothing, it runs them whole, whatever the budget.

Background requests (nobody waits for them) stand outside these rules: after all others, and from what the step has left, they get
a 64th of the budget between them, a 16th where they are alone; so others wait for a short step at most. Under a load that fills
every step they wait; whoever issued them gives them up in time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.errors import AlreadyExists, InternalError

_BESIDE_OTHERS, _ALONE = 64, 16  # background requests get such a part of the budget
_OLDEST_EVERY = 4  # in one of so many steps the earliest is first, whatever its rank


@dataclass(slots=True)
class TokenCursor:
    """One request's progress in tokens. Raises InternalError when the counts contradict each other.

    `num_prefill_tokens` is the whole of its work on a prefill worker, and 0 where decode tokens run too: there one step may hold
    a request's last prefill and its first decode tokens. A chunk never crosses it.
    """

    key: str
    num_prefill_tokens: int
    num_known: int
    num_computed: int
    rank: int = 0  # of its class; a higher one goes before
    is_background: bool = False
    whole: tuple[range, ...] = ()  # positions of which a chunk runs all that are left, or none; in order

    def __post_init__(self) -> None:
        if self.num_prefill_tokens < 0 or not 0 <= self.num_computed <= self.num_known:
            raise InternalError(f"request {self.key}: {self.num_computed} of {self.num_known} tokens run makes no sense")

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not yet run."""
        return self.num_known - self.num_computed

    @property
    def piece_stop(self) -> int:
        """Where the next chunk must end at the latest: the boundary P, then the last known token."""
        if self.num_computed < self.num_prefill_tokens:
            return min(self.num_prefill_tokens, self.num_known)
        return self.num_known

    @property
    def num_piece_tokens(self) -> int:
        """Tokens from here to `piece_stop`."""
        return self.piece_stop - self.num_computed

    def uncut(self, num_tokens: int) -> int:
        """At most so many tokens of the piece, ending before any of `whole` that they would cut."""
        stop = self.num_computed + num_tokens
        for span in self.whole:
            if span.start < stop < span.stop:
                return max(0, span.start - self.num_computed)
        return num_tokens

    @property
    def num_least_tokens(self) -> int:
        """The shortest chunk there is: one token, or all that is left of `whole` ones that are next."""
        ends = [span.stop for span in self.whole if span.start <= self.num_computed < span.stop]
        return ends[0] - self.num_computed if ends else 1

    @property
    def is_decode_row(self) -> bool:
        """True when exactly one token is pending and it is a decode token."""
        return self.num_pending == 1 and self.num_computed >= self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of one request, run in one step; none of them lies beyond `piece_stop`."""

    key: str
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """`min_chunk_tokens`: what rows leave to waiting chunks, and the least a chunk is cut to unless that ends its piece."""

    min_chunk_tokens: int = 32

    def __post_init__(self) -> None:
        if self.min_chunk_tokens < 1:
            raise ValueError("min_chunk_tokens must be at least 1")


class Batcher:
    """The requests of one worker and the choice of each step. `next_step` decides, `complete` accounts."""

    def __init__(self, options: BatchingOptions | None = None) -> None:
        self._options = options or BatchingOptions()
        self._cursors: dict[str, TokenCursor] = {}  # in order of arrival
        self._last_step: dict[str, int] = {}  # when each request last had a chunk, or arrived
        self._in_flight: dict[str, Chunk] = {}
        self._num_steps = 0
        self._chunks_turn = False
        self._num_passing_steps = 0

    def __len__(self) -> int:
        return len(self._cursors)

    def __contains__(self, key: object) -> bool:
        return key in self._cursors

    def __getitem__(self, key: str) -> TokenCursor:
        """The live cursor of a request. Raises InternalError when it is not here."""
        try:
            return self._cursors[key]
        except KeyError:
            raise InternalError(f"request {key} is not in the batch") from None

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that no finished step has run."""
        return sum(cursor.num_pending for cursor in self._cursors.values())

    @property
    def has_work(self) -> bool:
        """Whether `next_step` would return a chunk (given budget and room)."""
        return next(self._runnable(), None) is not None

    def add(self, cursor: TokenCursor) -> None:
        """Take a request in, last in the order of arrival. Raises AlreadyExists when its key is here."""
        if cursor.key in self._cursors:
            raise AlreadyExists(f"request {cursor.key} is in the batch already")
        self._cursors[cursor.key] = cursor
        self._last_step[cursor.key] = self._num_steps  # behind the rows that wait already

    def remove(self, key: str) -> None:
        """Forget a request, at any time; harmless when it is not here. A chunk of it that still runs may be completed."""
        self._cursors.pop(key, None)
        self._last_step.pop(key, None)
        self._in_flight.pop(key, None)

    def extend(self, key: str, num_tokens: int = 1) -> None:
        """`num_tokens` more tokens of the request are known (sampled, or arrived). Raises InternalError when it is not here."""
        if num_tokens < 0:
            raise InternalError(f"request {key}: a request never unlearns tokens")
        self[key].num_known += num_tokens

    def complete(self, chunk: Chunk) -> None:
        """Account a chunk that has run. Ignored when its request was removed; InternalError when it was not due."""
        cursor = self._cursors.get(chunk.key)
        if cursor is None:
            return
        if self._in_flight.get(chunk.key) != chunk:
            raise InternalError(f"request {chunk.key}: tokens {chunk.start}…{chunk.stop} were not in flight")
        del self._in_flight[chunk.key]
        cursor.num_computed = chunk.stop

    def next_step(self, token_budget: int, max_requests: int) -> tuple[Chunk, ...]:
        """Choose the next step: at most `token_budget` tokens of at most `max_requests` requests, decode rows first.

        Never empty while a request has pending tokens that are not in flight, provided both limits are at least 1.
        A request has at most one chunk in flight; until `complete` it is not chosen again.
        """
        rows: list[TokenCursor] = []
        waiting: list[TokenCursor] = []
        background: list[TokenCursor] = []
        for cursor in self._runnable():
            (background if cursor.is_background else rows if cursor.is_decode_row else waiting).append(cursor)
        if token_budget < 1 or max_requests < 1 or not (rows or waiting or background):
            return ()

        num_rows, reserve = self._room_for_rows(token_budget, max_requests, rows=bool(rows), waiting=bool(waiting))
        if len(rows) > num_rows:
            rows = sorted(rows, key=lambda cursor: self._last_step[cursor.key])[:num_rows]
        step = [Chunk(row.key, row.num_computed, row.num_known) for row in rows]
        step += self._cut_chunks(waiting, token_budget - len(step), max_requests - len(step), reserve)
        left = token_budget - sum(chunk.num_tokens for chunk in step)
        share = max(1, token_budget // (_BESIDE_OTHERS if step else _ALONE))
        step += _cut_background(background, min(share, left), max_requests - len(step))
        self._num_steps += 1
        for chunk in step:
            self._in_flight[chunk.key] = chunk
            self._last_step[chunk.key] = self._num_steps
        return tuple(step)

    def _runnable(self) -> Iterator[TokenCursor]:
        return (cursor for cursor in self._cursors.values() if cursor.num_pending and cursor.key not in self._in_flight)

    def _room_for_rows(self, token_budget: int, max_requests: int, *, rows: bool, waiting: bool) -> tuple[int, int]:
        """(How many rows may run, tokens kept for chunks) by rule 2."""
        if not waiting:
            return min(token_budget, max_requests), 0
        reserve = min(self._options.min_chunk_tokens, max(1, token_budget // 2))
        num_rows = min(token_budget - reserve, max_requests - 1)
        if num_rows or not rows:
            return num_rows, reserve
        self._chunks_turn = not self._chunks_turn
        return (0, reserve) if self._chunks_turn else (1, reserve)

    def _cut_chunks(self, waiting: list[TokenCursor], num_tokens: int, num_requests: int, min_tokens: int) -> list[Chunk]:
        """Share `num_tokens` out to at most `num_requests` of the waiting requests by rules 3 to 5."""
        if not waiting or num_tokens < 1 or num_requests < 1:
            return []
        first = self._first(waiting)
        others = [cursor for cursor in waiting if cursor is not first]
        need = first.num_piece_tokens
        shares = {first.key: need if need <= num_tokens else -(-num_tokens // 2)}
        left = num_tokens - shares[first.key]
        for cursor in sorted(others, key=lambda cursor: (-cursor.rank, cursor.num_piece_tokens)):
            share = cursor.uncut(min(cursor.num_piece_tokens, left))
            if len(shares) == num_requests or share < min(min_tokens, cursor.num_piece_tokens):
                break
            shares[cursor.key] = share
            left -= share
        shares[first.key] = first.uncut(min(need, shares[first.key] + left)) or first.num_least_tokens
        return [Chunk(c.key, c.num_computed, c.num_computed + shares[c.key]) for c in waiting if c.key in shares]

    def _first(self, waiting: list[TokenCursor]) -> TokenCursor:
        """Whose turn it is by rule 3; `waiting` is in order of arrival."""
        highest = max(waiting, key=lambda cursor: cursor.rank)  # of equals the earliest
        if highest.rank == waiting[0].rank:
            return waiting[0]
        self._num_passing_steps += 1
        return waiting[0] if self._num_passing_steps % _OLDEST_EVERY == 0 else highest


def _cut_background(waiting: list[TokenCursor], num_tokens: int, num_requests: int) -> list[Chunk]:
    """In order of arrival, as far as both go."""
    chunks: list[Chunk] = []
    for cursor in waiting[: max(0, num_requests)]:
        share = cursor.uncut(min(cursor.num_piece_tokens, num_tokens))
        if share < 1 and not chunks and num_tokens > 0:
            share = cursor.num_least_tokens
        if share < 1:
            break
        chunks.append(Chunk(cursor.key, cursor.num_computed, cursor.num_computed + share))
        num_tokens -= share
    return chunks
