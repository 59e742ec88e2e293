"""`python -m shoal.constraints MODEL SECONDS`: checks constraints, one JSON line in and one out. What they do to it harms nobody
else: one that takes longer ends the process, by the alarm's own signal, as compiling listens to nothing else.

Lines in: {"kind": …, "text": …}. Lines out: {"ready": true} once, then {"error": words or null} for each.
"""

import json
import resource
import signal
import sys
from typing import Final

from shoal.constraints.compiler import ConstraintCompiler
from shoal.errors import ShoalError
from shoal.model_files import load_tokenizer, open_model
from shoal.types import Constraint, ConstraintKind

_MAX_MEMORY_BYTES: Final = 4 << 30


def main(model_name: str, limit_s: float) -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    model = open_model(model_name)
    tokenizer = load_tokenizer(model)
    compiler = ConstraintCompiler(lambda: tokenizer, model.config.shape.vocab_size, model.config.eos_token_ids, max_remembered=1)
    compiler.check(Constraint(ConstraintKind.REGEX, "a"))  # reads the vocabulary, before the clock runs
    _say(ready=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            compiler.check(Constraint(ConstraintKind(asked["kind"]), asked["text"]))
        except ShoalError as error:
            words: str | None = str(error)
        else:
            words = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(error=words)


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
