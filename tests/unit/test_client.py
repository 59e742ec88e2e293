"""Both clients and the command line against a router over scripted workers, on real gRPC."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from shoal.cli.main import COMMANDS, cli
from shoal.client import AsyncClient, Chunk, Client, Completion, Message, Sampling
from shoal.client.requests import Options, build_request
from shoal.errors import CapacityExceeded, DeadlineExceeded, InvalidRequest, Unavailable
from shoal.model_files import known_models, load_tokenizer, open_model
from shoal.types import FinishReason
from tests.fakes.cluster import Cluster

TEXT = "Fish turn together, 日本語."


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as c:
        c.decode[0].script = [*load_tokenizer(open_model("smollm2-135m")).encode(TEXT), 2]
        yield c


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


async def test_the_synchronous_client_streams_and_completes(cluster: Cluster) -> None:
    def use() -> tuple[list[Chunk | Completion], Completion]:
        with Client(cluster.address) as client:
            events = list(client.generate("Why?", visibility="speed:22", sampling=Sampling(logprobs=2), request_id="mine"))
            return events, client.complete("Why?", visibility="speed:22", sampling=Sampling(seed=9))

    events, whole = await asyncio.to_thread(use)
    *chunks, done = events
    assert isinstance(done, Completion) and all(isinstance(chunk, Chunk) for chunk in chunks) and chunks
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == done.text == whole.text == TEXT
    assert done.request_id == "mine" and whole.seed == 9 and whole.request_id
    assert done.finish_reason is FinishReason.STOP and done.matched_stop == 2 and done.visibility == "speed:22:boundary=4"
    assert len(done.logprobs) == done.completion_tokens == len(done.token_ids) and not whole.logprobs
    assert done.logprobs[0].top == ((done.token_ids[0], -0.5),)
    assert done.transfer.payload_bytes == done.transfer.plan_bytes > 0 and done.transfer.full_depth_bytes > 0
    assert done.timings.prefill_ms == 3 and done.timings.ttft_ms > 0
    assert (done.decode_kv_layer_tokens, done.decode_kv_bytes) == (7, 70)


async def test_the_asyncio_client_does_the_same_and_more(cluster: Cluster) -> None:
    async with AsyncClient(cluster.address) as client:
        done = await client.complete([Message("system", "Be brief."), Message("user", "Why?")])
        same = await client.complete("Why?", system="Be brief.")
        raw = await client.complete("Why?", raw=True)
        ids = await client.complete(token_ids=[5, 6, 7], sampling=Sampling(max_tokens=1))
        assert done.text == raw.text == TEXT and ids.completion_tokens == 1
        assert done.prompt_tokens == same.prompt_tokens > raw.prompt_tokens and ids.prompt_tokens == 3
        assert (await client.model_info()).served_model_name == "smollm2-135m"
        assert len((await client.server_info()).workers) == 2 == len(await client.loads())
        cluster.decode[0].delay_s, cluster.decode[0].script = 0.01, [40]
        running = asyncio.create_task(client.complete("Why?", request_id="x"))
        await cluster.decode[0].busy()
        assert await client.abort("x", "y") == 1
        assert (await running).finish_reason is FinishReason.ABORT


async def test_tokenizing_both_ways(cluster: Cluster) -> None:
    def use() -> tuple[tuple[int, ...], str]:
        with Client(cluster.address) as client:
            ids = client.tokenize(TEXT, raw=True)
            return ids, client.detokenize(ids)

    tokenizer = load_tokenizer(open_model("smollm2-135m"))
    assert await asyncio.to_thread(use) == (tuple(tokenizer.encode(TEXT)), TEXT)
    async with AsyncClient(cluster.address) as client:
        chat = await client.tokenize([Message("user", "Why?")])
        text = await client.detokenize(chat)
        assert text.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
        assert "<|" not in await client.detokenize(chat, skip_special_tokens=True)
        assert await client.tokenize("Why?", raw=True, add_special_tokens=False) == tuple(tokenizer.encode("Why?"))
        with pytest.raises(InvalidRequest, match=r"token_ids\[0\] is 99999999"):
            await client.detokenize([99999999])
        with pytest.raises(InvalidRequest, match="empty"):
            await client.tokenize("", raw=True)


async def test_leaving_a_stream_cancels_the_request(cluster: Cluster) -> None:
    cluster.decode[0].delay_s, cluster.decode[0].script = 0.01, [40]

    def leave() -> None:
        with Client(cluster.address) as client:
            for _ in client.generate("Why?"):
                break

    await asyncio.to_thread(leave)
    await cluster.decode[0].idle()
    async with AsyncClient(cluster.address) as client:
        events = client.generate("Why?")
        await anext(events)
        await events.aclose()
        await cluster.decode[0].idle()


async def test_errors_come_back_as_classes(cluster: Cluster) -> None:
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(InvalidRequest, match="depth 31 exceeds"):
            await client.complete("Why?", visibility="speed:31")
        cluster.decode[0].error = CapacityExceeded("0 blocks free; retry later")
        with pytest.raises(CapacityExceeded, match="0 blocks free"):
            await client.complete("Why?")
        cluster.decode[0].error, cluster.decode[0].hang = None, True
        with pytest.raises(DeadlineExceeded):
            await client.complete("Why?", timeout_s=0.2)
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1"):
            await client.complete("Why?")
    with Client("127.0.0.1:1") as sync_client, pytest.raises(Unavailable, match="no server answers"):
        await asyncio.to_thread(sync_client.model_info)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": "a", "token_ids": [1]}, "not both"),
        ({}, "give a prompt or token ids"),
        ({"token_ids": [1], "system": "s"}, "leave out"),
        ({"prompt": "a", "raw": True, "system": "s"}, "leave out"),
        ({"prompt": "a", "sampling": Sampling(seed=-1)}, "out of range"),
        ({"token_ids": [-1]}, "out of range"),
        ({"token_ids": [1 << 40]}, "out of range"),
    ],
)
def test_contradictions_are_refused_before_any_call(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        build_request(arguments.pop("prompt", None), Options(**arguments), stream=False)


async def test_generate_prints_the_answer_on_stdout_and_figures_on_stderr(cluster: Cluster) -> None:
    plain = await asyncio.to_thread(run, "generate", "Why?", "--address", cluster.address)
    assert (plain.exit_code, plain.stdout, plain.stderr) == (0, TEXT + "\n", "")
    piped = await asyncio.to_thread(lambda: run("generate", "-", "--raw", "-a", cluster.address, "-n", "2", stdin="Once"))
    assert piped.exit_code == 0 and piped.stdout == "Fish turn\n"
    stats = await asyncio.to_thread(run, "generate", "Why?", "-a", cluster.address, "-v", "speed:22", "--stats")
    assert stats.stdout == TEXT + "\n" and "speed:22:boundary=4" in stats.stderr
    for words in ("TTFT", "TPOT", "2200 bytes, equal to the plan", "% saved", "7 layer-tokens", "prefill-0 → decode-0"):
        assert words in " ".join(stats.stderr.split())
    ids = await asyncio.to_thread(run, "generate", "--token-ids", "5, 6,7", "-a", cluster.address)
    assert ids.exit_code == 0 and list(cluster.decode[0].seen[-1].prompt_ids) == [5, 6, 7]


async def test_retries_are_told_on_stderr() -> None:
    async with Cluster(1, 2) as c:
        for worker in c.decode:
            worker.fail_after = (2, Unavailable("killed"))
        told = await asyncio.to_thread(run, "generate", "Why?", "-a", c.address, "-n", "3")
        assert told.exit_code == 0 and "notice: resumed after 2 tokens" in told.stderr


async def test_bad_input_ends_with_one_line_and_a_code(cluster: Cluster) -> None:
    for arguments, code, words in (
        (["hi", "--token-ids", "1"], 2, "not both"),
        ([], 2, "give a prompt"),
        ([""], 2, "chat message 0 is empty"),
        (["", "--raw"], 2, "prompt is empty"),
        (["--token-ids", "one"], 2, "must be numbers"),
        (["--token-ids", "99999999"], 2, "lie in 0…49151"),
        (["hi", "-v", "deep"], 2, "unknown visibility"),
        (["hi", "--temperature", "nan"], 2, "temperature must be"),
        (["hi", "--max-tokens", "9000"], 2, "set max_tokens to at most"),
        (["hi", "-a", "127.0.0.1:1"], 3, "no server answers at 127.0.0.1:1"),
    ):
        result = await asyncio.to_thread(run, "generate", "-a", cluster.address, *arguments)
        assert result.exit_code == code and result.stdout == "", arguments
        assert result.stderr.startswith("error: ") and words in result.stderr and result.stderr.count("\n") == 1
    assert not cluster.decode[0].seen


async def test_info_and_loads(cluster: Cluster) -> None:
    info = await asyncio.to_thread(run, "info", "-a", cluster.address)
    assert info.exit_code == 0
    for words in ("smollm2-135m", "full, speed:22, pop:20", "8192 tokens", "prefill-0", "decode-0", "ready", "Apache-2.0"):
        assert words in info.stdout
    loads = await asyncio.to_thread(run, "loads", "-a", cluster.address)
    assert loads.exit_code == 0 and "decode-0" in loads.stdout
    assert run("loads", "-a", "127.0.0.1:1").exit_code == 3


def test_models_version_and_help_need_no_server() -> None:
    assert "smollm2-135m" in run("models").stdout
    assert run("version").stdout.startswith("shoal 0.")
    shown = run("--help")
    assert shown.exit_code == 0 and all(name in shown.stdout for name in COMMANDS) and "Exit codes" in shown.stdout
    assert "--visibility" in run("generate", "--help").stdout
    unknown = run("swim")
    assert unknown.exit_code == 2 and "No such command" in unknown.stderr


def test_models_never_breaks_a_command_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(known_models()[0], name="x" * 30, package="a-package-" * 12, pieces=(("no_such_module", "a.gguf"),))
    monkeypatch.setattr("shoal.cli.models.known_models", lambda: (missing,))
    assert missing.install_command in run("models").stdout.splitlines()


def test_help_and_generate_import_neither_torch_nor_ray_nor_unrelated_commands() -> None:
    code = (
        "import sys, json; from shoal.cli.main import cli\n"
        "import shoal.cli.generate, shoal.client, shoal.router.main\n"
        "print(json.dumps([m for m in ('torch', 'ray', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_every_command_of_the_table_can_be_loaded() -> None:
    loaded = 0
    for target, words in COMMANDS.values():
        module, _, attribute = target.partition(":")
        if importlib.util.find_spec(module) is not None:
            command = getattr(importlib.import_module(module), attribute)
            assert isinstance(command, click.Command) and words.endswith(".")
            loaded += 1
    assert loaded >= 5
