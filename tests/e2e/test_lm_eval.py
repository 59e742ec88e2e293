"""lm-eval against real workers: our own model over gRPC, and lm-eval's local-completions over HTTP, give the same figures."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.client import AsyncClient
from shoal.errors import InvalidConfig, InvalidRequest
from tests.e2e.served import Served, served

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHOICE = """
task: shoal_tiny_choice
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATE = """
task: shoal_tiny_generate
output_type: generate_until
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
task: shoal_tiny_rolling
output_type: loglikelihood_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
DOCS = [
    {"question": "Fish swim in", "choices": [" shoals", " trees"], "answer": 0, "text": "Fish swim in shoals. " * 3},
    {"question": "Two and two are", "choices": [" five", " four"], "answer": 1, "text": "Two and two are four. " * 40},
    {"question": "The sea is ", "choices": ["dry", "wet and wide"], "answer": 1, "text": "The sea is wet."},
]


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[Served]:
    async with served(tiny_model, router={"http_listen": "127.0.0.1:0", "flush_s": 0.0}) as found:
        yield found


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of task files, and no way to the network."""
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert os.environ["HF_HUB_OFFLINE"]
    return tmp_path


async def evaluate(tasks: Path, names: list[str], model: str, arguments: dict[str, Any], **options: Any) -> dict[str, list[Any]]:
    """For each task its samples' (filtered) responses, in order."""

    def run() -> dict[str, list[Any]]:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        import shoal.client.lm_eval_model  # noqa: F401  # registers the model

        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        found = simple_evaluate(model, arguments, tasks=names, task_manager=manager, bootstrap_iters=0, **options)
        return {name: [sample["filtered_resps"] for sample in found["samples"][name]] for name in names}

    return await asyncio.to_thread(run)


async def test_our_model_measures_what_is_served_and_agrees_with_local_completions(cluster: Served, tasks: Path) -> None:
    address, model = cluster.address, cluster.router.service.model_info().served_model_name
    both = ["shoal_tiny_choice", "shoal_tiny_generate"]
    ours = await evaluate(tasks, [*both, "shoal_tiny_rolling"], "shoal", {"address": address, "visibility": "full"})
    arguments = {
        "model": model, "base_url": f"http://{cluster.router.http_address}/v1/completions", "tokenizer_backend": "huggingface",
        "tokenizer": str(cluster.router.service.parts.model.path), "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    theirs = await evaluate(tasks, both, "local-completions", arguments)
    assert theirs["shoal_tiny_generate"] == ours["shoal_tiny_generate"]
    assert all(len(answer) == 1 and "e" not in answer[0] for answer in ours["shoal_tiny_generate"])
    for mine, other in zip(ours["shoal_tiny_choice"], theirs["shoal_tiny_choice"], strict=True):
        for (logprob, greedy), (http_logprob, http_greedy) in zip(mine, other, strict=True):
            assert logprob == pytest.approx(http_logprob, abs=1e-3) and greedy == http_greedy
    async with AsyncClient(address) as client:
        for doc, mine in zip(DOCS, ours["shoal_tiny_choice"], strict=True):
            question = str(doc["question"])
            for choice, (logprob, _) in zip(doc["choices"], mine, strict=True):  # type: ignore[call-overload]
                spaces = question[len(question.rstrip()) :]
                score = await client.score(question.rstrip(), spaces + choice, visibility="full")
                assert logprob == pytest.approx(score.total_logprob, abs=1e-4)
        for doc, (total,) in zip(DOCS, ours["shoal_tiny_rolling"], strict=True):
            ids = await client.tokenize(str(doc["text"]), raw=True, add_special_tokens=False)
            if len(ids) < 1000:  # within one window
                whole = await client.score([1], ids, visibility="full")
                assert total == pytest.approx(whole.total_logprob, rel=1e-4)


async def test_a_policy_is_measured_as_it_is_served_and_long_texts_are_cut(cluster: Served, tasks: Path) -> None:
    names = ["shoal_tiny_choice", "shoal_tiny_rolling"]
    by = {
        visibility: await evaluate(
            tasks, names, "shoal", {"address": cluster.address, "visibility": visibility, "max_length": 64}
        )
        for visibility in ("full", "pop:2", "speed:2")
    }
    assert by["full"] != by["pop:2"] != by["speed:2"] != by["full"]
    chat = await evaluate(tasks, ["shoal_tiny_generate"], "shoal", {"address": cluster.address}, apply_chat_template=True)
    assert len(chat["shoal_tiny_generate"]) == len(DOCS)


async def test_arguments_that_mean_nothing_are_refused(cluster: Served, tasks: Path) -> None:
    with pytest.raises(InvalidConfig, match="takes no argument 'pretrained'"):
        await evaluate(tasks, ["shoal_tiny_choice"], "shoal", {"address": cluster.address, "pretrained": "x"})
    with pytest.raises(InvalidRequest, match="num_beams is not offered"):
        await evaluate(tasks, ["shoal_tiny_generate"], "shoal", {"address": cluster.address}, gen_kwargs={"num_beams": 4})
    with pytest.raises(InvalidRequest, match="not allowed here"):
        await evaluate(tasks, ["shoal_tiny_choice"], "shoal", {"address": cluster.address, "visibility": "pop:1"})


async def test_shoal_eval_runs_tasks_through_score(cluster: Served, tasks: Path, tmp_path: Path) -> None:
    """`shoal eval --tasks lm-eval:…` says what lm-eval says, for each visibility, and names what it cannot run."""
    names, address = "lm-eval:shoal_tiny_choice,lm-eval:shoal_tiny_rolling", cluster.address
    flags = ["eval", "--tasks", names, "-v", "pop:2", "--server", address, "--lm-eval-include", str(tasks)]
    done = await asyncio.to_thread(CliRunner().invoke, cli, [*flags, "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())["lm-eval"]
    rows = {(row["task"], row["visibility"], row["metric"]): row["value"] for row in found}
    by = {text: rows["shoal_tiny_rolling", text, "word_perplexity"] for text in ("full", "pop:2")}
    assert by["full"] != by["pop:2"]
    ours = await evaluate(tasks, ["shoal_tiny_choice"], "shoal", {"address": address, "visibility": "full"})
    right = [
        max(range(2), key=lambda i: own[i][0]) == doc["answer"] for own, doc in zip(ours["shoal_tiny_choice"], DOCS, strict=True)
    ]
    assert rows["shoal_tiny_choice", "full", "acc"] == pytest.approx(sum(right) / len(right))
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["eval", "--tasks", "lm-eval:poetry", "--server", address])
    assert done.exit_code == 2 and "no task 'poetry'" in done.output
