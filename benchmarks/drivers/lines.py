"""What every peer's program speaks: one JSON object a line on stdin, one a line on stdout. Knows no engine.

Runs under each peer's own Python: nothing but the standard library may be imported here. Requests: {"prompts": [[ids]…],
"num_tokens": n} → {"marks": [[seconds of each of n tokens]…]}, measured from the moment when the ids are handed to the engine.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

Steps = Iterator[list[int]]  # one step of the engine: the indices of the prompts that got a token


def serve(load: Callable[[dict], tuple[str, Callable[[list[list[int]], int], Steps]]]) -> None:
    """Load the engine with the options of the first line, then answer until stdin ends or whoever asks is gone."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: a stopped process would not see the end of its stdin
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    about, generate = load(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": about}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        prompts, num_tokens = request["prompts"], request["num_tokens"]
        marks: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        for indices in generate(prompts, num_tokens):
            now = time.perf_counter() - begin
            for index in indices:
                marks[index].append(now)
        assert all(len(own) == num_tokens for own in marks), [len(own) for own in marks]
        print(json.dumps({"marks": marks}), file=out)
