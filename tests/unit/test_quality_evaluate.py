"""Scores against what they are defined as, the trunk against whole passes, baselines, loops, needles, and the command."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.errors import InvalidConfig
from shoal.model_files import load_tokenizer, open_model
from shoal.quality.data import DataOptions, load_data, shipped_records
from shoal.quality.evaluate.choices import is_right, load_questions, prompt
from shoal.quality.evaluate.curves import curves, needed
from shoal.quality.evaluate.generation import engine_decoder, generate
from shoal.quality.evaluate.loops import distinct_share, ends_in_loop
from shoal.quality.evaluate.needle import is_found, make_needles
from shoal.quality.evaluate.scores import Scorer, Subject
from shoal.quality.torch_model import Example, TorchDecoder, make_batch
from shoal.visibility import Visibility
from tests import engine_support as support
from tests.adapters import write_random_adapter
from tests.unit.test_quality_torch_model import CASES, examples, logprobs, model, resolved


def subject(own: TorchDecoder, text: str) -> Subject:
    return Subject(text, own, resolved(text))


def test_scores_are_what_they_are_defined_as() -> None:
    """Every visibility branches from the trunk and gives what a pass of its own gives, whatever the batch."""
    own = model()
    whole = Scorer(own, examples(), batch_size=4).score([subject(own, text) for text in CASES])
    single = Scorer(own, examples(), batch_size=1).score([subject(own, text) for text in CASES])
    for text, score, alone in zip(["full", *CASES], whole, single, strict=True):
        losses = [-value for row in logprobs(own, examples(), resolved(text)) for value in row]
        assert score.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
        assert (score.num_examples, score.num_tokens) == (4, 14)
        assert (score.kl, score.agreement) == pytest.approx((alone.kl, alone.agreement), abs=1e-4)
        assert score.ratio_low <= score.ratio <= score.ratio_high
    assert whole[0].kl == 0 and whole[0].agreement == 1 and whole[0].ratio == 1
    assert whole[1].kl == pytest.approx(0, abs=1e-6), "`full` as a subject is the reference"
    assert all(score.kl > 1e-4 for score in whole[3:])


def test_divergence_of_one_token_by_hand() -> None:
    own, given = model(), [Example(support.prompt(9), (7,))]
    _, score = Scorer(own, given).score([subject(own, "speed:1")])
    with torch.inference_mode():
        full, shallow = (own.logits(own(make_batch(given, resolved(t))))[0, -2].log_softmax(-1) for t in ("full", "speed:1"))
    assert score.kl == pytest.approx(float((full.exp() * (full - shallow)).sum()), abs=1e-5)


def test_damaged_weights_are_named() -> None:
    own, broken = model(), model()
    broken.model.layers[2].mlp.up_proj.weight.data[0] = math.nan
    with pytest.raises(InvalidConfig, match=r"broken: .*no finite numbers"):
        Scorer(own, examples()).score([Subject("broken", broken, resolved("full"))])
    with pytest.raises(InvalidConfig, match="no example"):
        Scorer(own, [])


def test_an_adapter_is_measured_beside_full_depth_without_it(tmp_path: Path) -> None:
    files = support.model_files()
    adapter = str(write_random_adapter(tmp_path / "adapter", files))
    flags = "--tasks perplexity,loops,choices -v speed:2 -v full:boundary=2 --examples 2 --prompt-tokens 24 --response-tokens 5"
    flags += " --answers 2 --max-tokens 8 --threads 1 --num-questions 2 --questions"
    (tmp_path / "q.jsonl").write_text('{"question": "?", "choices": ["a", "b"], "answer": 0}')
    arguments = ["eval", str(files.path), *flags.split(), str(tmp_path / "q.jsonl"), "--json", str(tmp_path / "found.json")]
    found = []
    for more in ([], ["--adapter", adapter]):
        done = CliRunner().invoke(cli, [*arguments, *more])
        assert done.exit_code == 0, done.output
        found.append({own["name"]: own for own in json.loads((tmp_path / "found.json").read_text())["perplexity"]})
    assert "with adapter" in done.output
    plain, tuned = found
    assert tuned["full"] == plain["full"], "full depth is the model's own"
    assert plain["full:boundary=2"]["ratio"] == pytest.approx(1, abs=1e-5) and tuned["full:boundary=2"]["kl"] > 1e-3
    data = load_data("python-topics", files, DataOptions(2, 24, 5))
    own = TorchDecoder.load(open_model(str(files.path), adapter))
    losses = [-value for row in logprobs(own, list(data.examples), resolved("speed:2")) for value in row]
    assert tuned["speed:2"]["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


@pytest.mark.parametrize(
    "variant", ["llama", "qwen2-bias-mixed-windows", "qwen3-qk-norm-tied", "gemma2-caps-window", "gemma3-window"]
)
def test_answers_come_from_the_weights_given(variant: str) -> None:
    own = model(variant)
    decoder = engine_decoder(own, backend="torch")
    prompts = [support.prompt(11, seed) for seed in range(3)]
    visibility = Visibility.parse("speed:2").resolve(own.num_layers)
    answers = generate(decoder, prompts, visibility, 6)
    engine = support.engine(support.decoder(variant, backend="torch"))
    expected = engine.generate([support.greedy(ids, "speed:2", 6, ignore_eos=False) for ids in prompts])
    assert answers == [result.token_ids for result in expected]


def test_loops() -> None:
    assert ends_in_loop([*range(50), *[1, 2, 3] * 11])
    assert ends_in_loop([5] * 32)
    assert not ends_in_loop([5] * 20), "too short to call"
    assert not ends_in_loop(list(range(100)))
    assert not ends_in_loop([*[1, 2, 3] * 11, 9, 8])
    assert distinct_share([1, 2, 3, 4] * 10) == pytest.approx(4 / 37)
    assert distinct_share([1]) == 1


def test_needles_lie_where_they_are_asked_for() -> None:
    tokenizer = load_tokenizer(support.smollm2_files())
    needles = make_needles(shipped_records("python-topics"), tokenizer, [300, 500], [0.0, 0.5, 1.0], per_cell=2)
    assert len(needles) == 12
    for needle in needles:
        text = tokenizer.decode(needle.prompt_ids)
        place = text.index(needle.answer) / len(text)
        assert abs(place - (0.15 + 0.7 * needle.depth)) < 0.15
        assert 0.85 * needle.num_tokens < len(needle.prompt_ids) <= 1.05 * needle.num_tokens
        assert is_found(needle, f"It is {needle.answer}.") and not is_found(needle, "It is 12.")
    with pytest.raises(InvalidConfig, match="no room"):
        make_needles(shipped_records("python-topics"), tokenizer, [40], [0.5])


def test_choices_are_scored_by_length_after_examples_of_their_group(tmp_path: Path) -> None:
    lines = [
        {"question": f"Q{index}?", "choices": ["no", "yes indeed"], "answer": index % 2, "group": "ab"[index // 3]}
        for index in range(5)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    asked = load_questions(str(path))
    assert [question.text for question in asked] == ["Q0?", "Q3?", "Q1?", "Q4?", "Q2?"], "groups in turn"
    assert prompt(asked[0], asked, 1) == "Question: Q1?\nAnswer: yes indeed\n\nQuestion: Q0?\nAnswer:"
    assert asked[0].text not in prompt(asked[0], load_questions(str(path)), 4).split("\n\n")[0], "never its own example"
    assert is_right(asked[0], [1.0, 6.0]) and not is_right(asked[0], [1.0, 4.0]), "by characters: 2 and 10"
    flags = "--tasks choices -v speed:2 --examples 1 --prompt-tokens 8 --threads 1 --shots 1 --questions"
    done = CliRunner().invoke(cli, ["eval", str(support.model_files().path), *flags.split(), str(path)])
    assert done.exit_code == 0 and "as full depth" in done.output, done.output
    for line, words in (("{}", "cannot be read"), (json.dumps(lines[0] | {"answer": 5}), "0…1"), ("", "holds no line")):
        path.write_text(line)
        with pytest.raises(InvalidConfig, match=words):
            load_questions(str(path))


def test_curves_name_what_is_scored() -> None:
    lines = curves([20, 22], 22)
    texts = needed(lines)
    assert len(set(texts)) == len(texts) and {"pop:20", "speed:22:anchors=0", "speed:22:boundary=64"} <= set(texts)
    assert all(str(Visibility.parse(text)) == text for text in texts)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[quality]'")
    flags = (
        "--tasks perplexity,curve,baselines,loops,needle -v speed:2 -v pop:3 --examples 2 --prompt-tokens 24 --response-tokens 5"
    )
    flags += " --depths 2,3 --answers 2 --max-tokens 8 --needle-lengths 300 --needle-depths 0,1 --needles 1 --threads 1"
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "curve.png")]
    done = CliRunner().invoke(cli, ["eval", str(support.model_files().path), *flags.split(), *files])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [score["name"] for score in found["perplexity"]] == ["full", "speed:2", "pop:3"]
    names = [score["name"] for score in found["baselines"]]
    assert len(names) == 11 and any("ShortGPT" in name for name in names) and any("SliceGPT" in name for name in names)
    assert {cell["visibility"] for cell in found["needle"]} == {"full", "speed:2", "pop:3"}
    assert all(row["num_answers"] == 2 for row in found["loops"])
    assert (tmp_path / "curve.png").stat().st_size > 1000
    for words in ("÷ full", "end in a loop", "needle: found", "Wanda"):
        assert words in done.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tasks poetry", "known are perplexity"),
        ("--tasks ,", "--tasks is empty"),
        ("--tasks humaneval", "--run-code"),
        ("--tasks lm-eval:arc_easy", "give --server"),
        ("-v speed:9", "exceeds the model's 4 layers"),
        ("-v shallow", "unknown visibility"),
        ("--tasks curve --depths 2,4", "K goes from 1 to 3"),
        ("--tasks baselines --depth 4", "must lie in 1…3"),
        ("--tasks needle --needle-depths 2", "between 0 and 1"),
        ("--tasks needle --needle-lengths many", "must be numbers"),
        ("--batch-size 0", "--batch-size must be"),
        ("--prompt-tokens 600", "exceed the model's context"),
    ],
)
def test_flags_that_cannot_work(flags: str, words: str) -> None:
    few = ["--examples", "1", "--response-tokens", "2", "--threads", "1"]
    if "--prompt-tokens" not in flags:
        few += ["--prompt-tokens", "8"]
    done = CliRunner().invoke(cli, ["eval", str(support.model_files().path), *few, *flags.split()])
    assert done.exit_code == 2 and words in done.output, done.output
