"""Output tokens per second of several streams at once, beside the peers."""

from functools import partial

from benchmarks.bench import Bench, Marks
from benchmarks.tables import Row, Table

NAME = "streams"
TITLE = "Several streams"
_PROMPT, _TOKENS, _STREAMS = 256, 64, (8, 16)


def _steady(marks: Marks) -> float:
    """Tokens per second between the last stream's first token and the end."""
    begin, end = max(own[0] for own in marks), max(own[-1] for own in marks)
    return sum(sum(at > begin for at in own) for own in marks) / (end - begin)


def _whole(marks: Marks) -> float:
    """Tokens per second from the hand-over to the end, prefill included."""
    return sum(len(own) for own in marks) / max(own[-1] for own in marks)


def run(bench: Bench) -> list[Table]:
    steady, whole = [], []
    for count in _STREAMS:
        prompts = [bench.prompt(_PROMPT, seed) for seed in range(count)]
        runs = {name: partial(peer.generate, prompts, _TOKENS) for name, peer in bench.peers().items()}
        taken = bench.alternate(runs, bench.options.repeats)
        steady.append(Row(str(count), {name: tuple(map(_steady, own)) for name, own in taken.items()}))
        whole.append(Row(str(count), {name: tuple(map(_whole, own)) for name, own in taken.items()}))
        bench.say(f"{count} streams: done")
    what, marks = f"{_PROMPT} prompt and {_TOKENS} output tokens each, all handed over at once.", {"vllm": "at least 1.3"}
    cases = (("once all decode", steady), ("prefill included", whole))
    return [
        Table(f"{TITLE}: output tokens per second, {when}", "streams", "tokens/s", tuple(rows), "shoal", what, marks)
        for when, rows in cases
    ]
