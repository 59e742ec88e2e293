"""Time per token after the first, one stream, by context, beside the peers."""

from functools import partial

from benchmarks.bench import Bench
from benchmarks.tables import Row, Table

NAME = "decoding"
TITLE = "Each later token, one stream"
_TOKENS = 33


def run(bench: Bench) -> list[Table]:
    rows = []
    for length in bench.options.lengths:
        prompt = [bench.prompt(length)]
        runs = {name: partial(peer.generate, prompt, _TOKENS) for name, peer in bench.peers().items()}
        taken = bench.alternate(runs, bench.options.repeats)
        per_token = {
            name: tuple(1e3 * (marks[0][-1] - marks[0][0]) / (_TOKENS - 1) for marks in own) for name, own in taken.items()
        }
        rows.append(Row(f"{length:,}", per_token))
        bench.say(f"tokens behind {length} tokens of context: done")
    note = f"Mean over {_TOKENS - 1} greedy tokens; every repetition is one sample."
    return [Table(TITLE, "tokens of context", "ms", tuple(rows), base="shoal", note=note, marks={"vllm": "at most 0.7"})]
