"""Hostile input for every parser, spread over the cores, with a progress bar.

Ends with a table, and with status 1 when anything was found: an error that is not Shoal's own, more than a second of work, more
memory than the bound, or a page of words. The same seed makes the same inputs; `--only` runs one of them again.
"""

import argparse
import os
import sys
import time

from tests.fuzz.crew import TARGETS, run
from tests.fuzz.draw import Draw
from tests.fuzz.engine import Tally, input_bytes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many, over all targets")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only this one (may be repeated)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of each target's first input")
    parser.add_argument("--only", type=int, help="run this input of the one target again, and let its error escape")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    targets = [TARGETS[name] for name in options.target or TARGETS]
    if options.only is not None:
        given = targets[0].make(Draw(input_bytes(targets[0], options.seed, options.only)))
        print(repr(given)[:3000])
        targets[0].call(given)
        return 0
    began = time.monotonic()
    tallies = run(targets, options.inputs, options.seed, options.start, options.jobs)
    return report(tallies, options.seed, time.monotonic() - began)


def report(tallies: dict[str, Tally], seed: int, seconds: float) -> int:
    """Print the table and what was found; returns the exit status."""
    print(f"{'parser':<12} {'inputs':>9} {'taken':>9} {'refused':>9} {'slowest':>9} {'found':>6}")
    for name, tally in tallies.items():
        refused = sum(tally.refused.values())
        print(
            f"{name:<12} {tally.num_inputs:>9,} {tally.num_accepted:>9,} {refused:>9,} "
            f"{tally.slowest_s * 1e3:>6.0f} ms {len(tally.findings):>6}"
        )
    whole = sum(tally.num_inputs for tally in tallies.values())
    memory = max(tally.resident_bytes for tally in tallies.values()) >> 20
    print(f"{whole:,} inputs in {seconds:.0f} s, {whole / seconds:,.0f} a second, seed {seed}; {memory} MiB resident at most")
    found = {signature: (name, *found) for name, tally in tallies.items() for signature, found in tally.findings.items()}
    for signature, (name, number, words) in found.items():
        print(f"\nFOUND {signature}\n  {words}\n  again: python -m tests.fuzz --target {name} --seed {seed} --only {number}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
