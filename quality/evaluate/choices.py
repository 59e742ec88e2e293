"""Multiple-choice questions in OLMES's cloze form: each answer's text is scored after the question, by length. Knows no model.

OLMES (arXiv 2406.08446): "Question: …\\nAnswer:" and " answer", log-probability divided by the answer's characters, examples
before the question. Questions: a user's JSONL, or MMLU's development questions, out of lm-eval's package.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from shoal.errors import InvalidConfig

MMLU_DEV: Final = "mmlu-dev"
_FILE: Final = "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
_FORM: Final = '{"question": "…", "choices": ["…", "…"], "answer": 0}'
_QUESTION: Final = re.compile(
    r"(?s)(.*?)\s*\(A\)\s(.*?)\s\(B\)\s(.*?)\s\(C\)\s(.*?)\s\(D\)\s(.*?)\nA: Let's think step by step\."
    r".*The answer is \(([A-D])\)\.?\s*"
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answers, and which is right."""

    group: str  # examples before a question come from its own group
    text: str
    choices: tuple[str, ...]
    answer: int


def load_questions(source: str, limit: int | None = None) -> list[Question]:
    """The first `limit` questions, from the groups in turn. Raises InvalidConfig for a file that cannot be used."""
    found = _mmlu_dev() if source == MMLU_DEV else _read(Path(source))
    groups: dict[str, list[Question]] = {}
    for question in found:
        groups.setdefault(question.group, []).append(question)
    longest = max(len(group) for group in groups.values())
    turns = [group[turn] for turn in range(longest) for group in groups.values() if turn < len(group)]
    return turns[:limit]


def prompt(question: Question, everyone: Sequence[Question], num_shots: int) -> str:
    """The question after `num_shots` answered ones of its group (as many as there are)."""
    shots = [other for other in everyone if other.group == question.group and other != question][:num_shots]
    before = [f"Question: {shot.text}\nAnswer: {shot.choices[shot.answer]}" for shot in shots]
    return "\n\n".join([*before, f"Question: {question.text}\nAnswer:"])


def is_right(question: Question, losses: Sequence[float]) -> bool:
    """Whether the right answer has the least loss a character."""
    each = [loss / max(1, len(choice)) for loss, choice in zip(losses, question.choices, strict=True)]
    return each.index(min(each)) == question.answer


def _mmlu_dev() -> list[Question]:
    spec = find_spec("lm_eval")
    path = Path(spec.origin).parent / _FILE if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise InvalidConfig(
            f"{MMLU_DEV} is read from lm-eval's package, which is not installed; run: pip install -e '.[eval]', or give a "
            f".jsonl file of lines {_FORM} by --questions"
        )
    found = []
    for group, text in json.loads(path.read_text(encoding="utf-8")).items():
        for part in text.split("\n\nQ: ")[1:]:
            if match := _QUESTION.fullmatch(part):
                *words, letter = match.groups()
                found.append(Question(group, words[0], tuple(words[1:]), "ABCD".index(letter)))
    return found


def _read(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"questions {str(path)!r} cannot be read ({error}); give {MMLU_DEV} or a .jsonl file") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_question(f"{path}:{number}", line))
    if not found:
        raise InvalidConfig(f"questions {str(path)!r} holds no line; each must be {_FORM}")
    return found


def _question(where: str, line: str) -> Question:
    try:
        found = json.loads(line)
        text, choices, answer = found["question"], tuple(found["choices"]), found["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{where} cannot be read ({error}); each line must be {_FORM}") from error
    if not (isinstance(text, str) and len(choices) > 1 and all(isinstance(c, str) and c for c in choices)):
        raise InvalidConfig(f"{where}: a question needs a text and at least two answers of text, as in {_FORM}")
    if not (isinstance(answer, int) and 0 <= answer < len(choices)):
        raise InvalidConfig(f"{where}: 'answer' must be the place of the right answer, 0…{len(choices) - 1}")
    return Question(str(found.get("group", "")), text, choices, answer)
