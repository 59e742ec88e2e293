"""Time to first token of one prompt, whole model, beside the peers."""

from functools import partial

from benchmarks.bench import Bench
from benchmarks.tables import Row, Table

NAME = "first-token"
TITLE = "First token of one prompt"


def run(bench: Bench) -> list[Table]:
    rows = []
    for length in bench.options.lengths:
        prompt = [bench.prompt(length)]
        runs = {name: partial(peer.generate, prompt, 1) for name, peer in bench.peers().items()}
        taken = bench.alternate(runs, bench.options.repeats)
        rows.append(Row(f"{length:,}", {name: tuple(1e3 * marks[0][0] for marks in own) for name, own in taken.items()}))
        bench.say(f"first token of {length} tokens: done")
    note = (
        "From token ids to the first token's id, one request at a time, the whole prompt in one step where the engine allows it."
    )
    return [Table(TITLE, "prompt tokens", "ms", tuple(rows), base="shoal", note=note, marks={"vllm": "at most 0.8"})]
