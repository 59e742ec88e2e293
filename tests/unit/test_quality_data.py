"""Data for the quality tools: shipped texts, JSON lines of every form, and what cannot be used is refused with words."""

import json
from pathlib import Path

import pytest

from shoal.errors import InvalidConfig
from shoal.quality.data import DataOptions, load_data, read_jsonl, shipped_records, write_corpus
from tests import engine_support as support

SMALL = DataOptions(max_examples=5, prompt_tokens=20, response_tokens=6)


def write(folder: Path, *lines: object) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_shipped_texts_are_the_same_every_time() -> None:
    model = support.model_files()
    first = load_data("python-topics", model, SMALL)
    assert first == load_data("python-topics", model, SMALL)
    assert first != load_data("python-topics", model, DataOptions(5, 20, 6, seed=1))
    assert [(len(e.prompt_ids), len(e.response_ids)) for e in first.examples] == [(20, 6)] * 5
    assert first.boundary_tokens == 1 and first.num_response_tokens == 30


def test_docstrings_of_a_package() -> None:
    texts = [record.text or "" for record in shipped_records("docstrings:gguf")]
    assert texts and all(text.isascii() for text in texts)
    with pytest.raises(InvalidConfig, match="not installed"):
        shipped_records("docstrings:no_such_package")


def test_every_form_of_line(tmp_path: Path) -> None:
    model = support.smollm2_files()
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    path = write(tmp_path, {"prompt": "One and one are", "response": " two."}, {"messages": turns}, "", {"text": "fish " * 200})
    data = load_data(path, model, DataOptions(3, 50, 10))
    plain, chat, excerpt = data.examples
    assert plain.prompt_ids[0] != 1 and chat.prompt_ids[0] == 1  # only the conversation has the template's markers
    assert chat.response_ids[-1] in model.config.eos_token_ids
    assert (len(excerpt.prompt_ids), len(excerpt.response_ids)) == (50, 10)
    assert data.boundary_tokens > 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "Only a question"}, 'no response.*add "response"'),
        ({"messages": [{"role": "user", "content": "?"}]}, "last message must be the assistant's"),
        ({"messages": [{"role": "assistant", "content": "!"}]}, "must come before"),
        ({"messages": [{"role": "robot", "content": "!"}]}, "needs a role"),
        ({"question": "x"}, "holds .'question'."),
        ({"text": 5}, "must be a text"),
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ("", "holds no line"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        read_jsonl(Path(write(tmp_path, line)))


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    model = support.model_files()
    with pytest.raises(InvalidConfig, match="no text of 26 tokens"):
        load_data(write(tmp_path, {"text": "short"}), model, SMALL)
    with pytest.raises(InvalidConfig, match="exceeds the model's context of 512"):
        load_data(write(tmp_path, {"prompt": "x" * 600, "response": "y"}), model, SMALL)
    with pytest.raises(InvalidConfig, match="exceed the model's context"):
        load_data("python-topics", model, DataOptions(1, 600, 6))
    with pytest.raises(InvalidConfig, match="python-topics: topics"):
        load_data("wikipedia", model, SMALL)
    with pytest.raises(InvalidConfig, match="does not exist"):
        load_data(str(tmp_path / "none.jsonl"), model, SMALL)


PROSE = "The cache keeps what was asked before, so that the same question costs nothing the second time it is asked."


def test_a_corpus_of_docstrings_and_documentation(tmp_path: Path) -> None:
    """As much of one kind as of the other, in pieces; the held-out package's docstrings are in no piece; the same every time."""
    for package, words in (("learnt", "A learnt thing."), ("kept", "A kept thing.")):
        (tmp_path / "site" / package).mkdir(parents=True)
        functions = [f'def f{n}():\n    """{words} Number {n}. {PROSE} {PROSE} {PROSE}"""\n' for n in range(60)]
        (tmp_path / "site" / package / "__init__.py").write_text("\n".join(functions))
    (tmp_path / "docs").mkdir()
    blocks = [f":meth:`~a.b` {PROSE} {PROSE}\n\n.. code:: python\n\n    x = {n}\n\nHeading\n=======" for n in range(20)]
    (tmp_path / "docs" / "guide.rst").write_text("\n\n".join(blocks))
    (tmp_path / "docs" / "short.md").write_text(PROSE)
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    size = write_corpus(train, held, sites=[tmp_path / "site"], hold=["kept"], docs=[tmp_path / "docs"])
    written = train.read_text()
    texts = [record.text or "" for record in read_jsonl(train)]
    assert (size.num_trained, size.num_held_out) == (2, 1) == (len(texts), len(read_jsonl(held)))
    assert ["learnt" in text for text in texts] == [True, False] and "kept thing" not in written
    assert texts[1].startswith(f"a.b {PROSE}") and "code::" not in written and "Heading" not in written
    write_corpus(train, held, sites=[tmp_path / "site"], hold=["kept"], docs=[tmp_path / "docs"])
    assert train.read_text() == written
    write_corpus(train, held, sites=[tmp_path / "site"], hold=["kept"])
    assert len(read_jsonl(train)) > 2 and "a.b" not in train.read_text()
    with pytest.raises(InvalidConfig, match="no folder of documentation"):
        write_corpus(train, held, docs=[tmp_path / "none"])
