"""What one run asks, who leaves when, and whom it kills: all from one seed. Pure: no clock, no cluster, no model."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Leave(StrEnum):
    """How a caller gives up."""

    TIME = "time"  # closes its stream after so long
    TOKENS = "tokens"  # closes its stream at the n-th token
    DEADLINE = "deadline"  # its call brings too short a deadline
    ABORT = "abort"  # another call aborts it by its id


class Deed(StrEnum):
    """What is done to a process."""

    KILL = "kill"  # SIGKILL to a worker
    PAIR = "pair"  # SIGKILL to a prefill and a decode worker at once
    HANG = "hang"  # SIGSTOP to a worker; the cluster must find it and end it
    PAUSE = "pause"  # SIGSTOP to a worker, SIGCONT before it counts as hung; its peers may have given it up
    ROUTER = "router"  # SIGKILL
    HANG_ROUTER = "hang router"  # SIGSTOP; `shoal serve` must find it
    CONTROLLER = "controller"  # SIGKILL; needs a Ray that outlives it
    ORPHAN = "orphan"  # SIGKILL to the controller and a worker at once: nobody is there to tell of its death


class Moment(StrEnum):
    """What a worker should be doing when it is hit."""

    ANY = "any"
    TRANSFER = "transfer"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Question:
    """One distinct thing to ask; its right answer is known from the reference."""

    prompt_ids: tuple[int, ...]
    visibility: str
    max_tokens: int
    temperature: float
    seed: int
    n: int
    logprobs: bool  # compare the scores too
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Departure:
    """When a caller gives up: whichever of the two its way of leaving looks at."""

    how: Leave
    after_s: float
    after_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: which question, when, and whether its caller leaves early."""

    index: int
    question: int
    at_s: float  # since the start
    departure: Departure | None


@dataclass(frozen=True, slots=True)
class Strike:
    """One attack. `pick` in 0…1 chooses among the workers that fit."""

    deed: Deed
    moment: Moment
    pool: str
    pick: float


@dataclass(frozen=True, slots=True)
class Mix:
    """What kind of requests a model is asked, and how fast they come."""

    vocab_size: int
    visibilities: tuple[str, ...]
    prompt_tokens: tuple[int, int]  # from, to
    max_tokens: tuple[int, int]
    num_questions: int
    rate: float  # requests a second; bursts of up to 8 come together
    max_open: int  # requests at once; beyond, arrivals wait
    patience_s: float  # callers that leave do so within about this
    cancelled: float = 0.2  # share


@dataclass(frozen=True, slots=True)
class Plan:
    """All of one run but the moments of its strikes, which depend on when the last victim is back."""

    questions: tuple[Question, ...]
    asks: tuple[Ask, ...]


def make_plan(mix: Mix, num_requests: int, seed: int) -> Plan:
    """Equal arguments give equal plans."""
    rng = random.Random(f"questions {seed}")
    questions = tuple(_question(mix, rng) for _ in range(min(mix.num_questions, num_requests)))
    rng = random.Random(f"asks {seed}")
    asks: list[Ask] = []
    at_s = 0.0
    while len(asks) < num_requests:
        burst = rng.choice((1, 1, 1, 2, 4, 8))
        at_s += rng.expovariate(mix.rate / burst)
        for _ in range(min(burst, num_requests - len(asks))):
            question = rng.randrange(len(questions))
            leaves = rng.random() < mix.cancelled
            departure = _departure(mix, questions[question], rng) if leaves else None
            asks.append(Ask(len(asks), question, at_s, departure))
    return Plan(questions, tuple(asks))


def _question(mix: Mix, rng: random.Random) -> Question:
    low, high = mix.prompt_tokens
    length = min(high, max(low, int(low * (high / max(1, low)) ** rng.random())))  # as many short ones as long ones
    return Question(
        prompt_ids=tuple(rng.randrange(3, mix.vocab_size) for _ in range(length)),
        visibility=rng.choice(mix.visibilities),
        max_tokens=rng.randint(*mix.max_tokens),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        seed=rng.getrandbits(63),
        n=2 if rng.random() < 0.1 else 1,
        logprobs=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.8,
    )


def _departure(mix: Mix, question: Question, rng: random.Random) -> Departure:
    how = rng.choice(tuple(Leave))
    after_s = mix.patience_s * rng.random() ** 2  # early phases are short: more callers leave in them
    return Departure(how, max(after_s, 0.003), rng.randint(1, question.max_tokens))


_WEIGHTS = {
    Deed.KILL: 62,
    Deed.PAIR: 6,
    Deed.HANG: 8,
    Deed.PAUSE: 10,
    Deed.ROUTER: 5,
    Deed.HANG_ROUTER: 2,
    Deed.CONTROLLER: 4,
    Deed.ORPHAN: 4,
}


def strikes(seed: int, deeds: frozenset[Deed] = frozenset(Deed)) -> Iterator[Strike]:
    """Whom to hit next, without end; mostly single workers."""
    rng = random.Random(f"strikes {seed}")
    weights = {deed: weight for deed, weight in _WEIGHTS.items() if deed in deeds}
    while True:
        [deed] = rng.choices(list(weights), list(weights.values()))
        yield Strike(deed, rng.choice(tuple(Moment)), rng.choice(("prefill", "decode")), rng.random())
