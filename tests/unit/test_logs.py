"""One line an event, as text and as JSON: whose request it is, what a client named cannot forge a line, and nothing it wrote."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from shoal.cli.progress import StartProgress
from shoal.config.logs import JsonLines, TextLines, bind_log_ids, log_event, log_ids, loggable
from shoal.errors import InvalidRequest, NotFound, Unavailable
from tests.fakes.cluster import Cluster, request

_log = logging.getLogger("shoal.test")


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, object]]]]:
    """What is logged at debug level, read back from JSON lines; the text form is written beside it."""
    streams = io.StringIO(), io.StringIO()
    handlers = [logging.StreamHandler(stream) for stream in streams]
    root, level = logging.getLogger(), logging.getLogger().level
    for handler, form in zip(handlers, (JsonLines("router"), TextLines("router")), strict=True):
        handler.setFormatter(form)
        root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    read = lambda: [line for line in map(json.loads, streams[0].getvalue().splitlines()) if line["logger"].startswith("shoal")]  # noqa: E731
    read.text = streams[1].getvalue  # type: ignore[attr-defined]
    yield read
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(level)


def text(read: Callable[[], list[dict[str, object]]]) -> str:
    return read.text()  # type: ignore[attr-defined, no-any-return]


def test_an_event_carries_its_ids_and_fields(lines: Callable[[], list[dict[str, object]]]) -> None:
    with log_ids(request_id="r1", attempt_id=""):
        log_event(_log, logging.INFO, "transfer finished", payload_bytes=12, seconds=0.12345678, error=None, worker="")
        with log_ids(attempt_id="a1"):
            _log.warning("an ordinary line of %d words", 5)
    _log.info("nobody's")
    first, second, third = lines()
    assert first["time"] == second["time"] or str(first["time"]) < str(second["time"])
    assert str(first.pop("time")).endswith("Z")
    assert first == {
        "level": "info", "process": "router", "logger": "shoal.test", "message": "transfer finished",
        "request_id": "r1", "payload_bytes": 12, "seconds": 0.123457,
    }  # fmt: skip
    assert (second["request_id"], second["attempt_id"], second["message"]) == ("r1", "a1", "an ordinary line of 5 words")
    assert "request_id" not in third
    assert " INFO router shoal.test: transfer finished request_id=r1 payload_bytes=12 seconds=0.123457\n" in text(lines)


def test_what_a_client_names_makes_no_line_and_no_field_of_its_own(lines: Callable[[], list[dict[str, object]]]) -> None:
    forged = "x\n2026-01-01T00:00:00.000Z ERROR router shoal: forged level=critical\u2028\x1b[31m"
    with log_ids(request_id=forged):
        log_event(_log, logging.INFO, f"seen {forged}", time="never", message="other")
    [line] = lines()
    assert line["request_id"] == forged and line["time"] != "never" and str(line["message"]).startswith("seen")
    assert len(text(lines).splitlines()) == 1 and "\x1b" not in text(lines)
    assert r'request_id="x\n2026' in text(lines)


def test_errors_of_refused_requests_are_named_without_their_words() -> None:
    assert loggable(InvalidRequest("grammar 'my secret' does not parse")) == "InvalidRequest"
    assert loggable(NotFound("model 'my secret' is not served")) == "NotFound"
    assert loggable(Unavailable("gone")) == "Unavailable: gone"


def test_a_traceback_stays_with_its_line(lines: Callable[[], list[dict[str, object]]]) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        _log.exception("a step failed")
    [line] = lines()
    assert "RuntimeError: broken" in str(line["exception"]) and "\nTraceback" in text(lines)


async def test_tasks_started_inside_keep_the_ids_and_others_do_not(lines: Callable[[], list[dict[str, object]]]) -> None:
    async def work(name: str) -> None:
        bind_log_ids(request_id=name)
        await asyncio.sleep(0)
        await asyncio.gather(asyncio.create_task(asyncio.to_thread(_log.info, "%s", name)), asyncio.sleep(0))

    await asyncio.gather(work("a"), work("b"))
    _log.info("outside")
    assert {line.get("request_id") for line in lines() if line["message"] in "ab"} == {"a", "b"}
    assert all(line.get("request_id", "outside") == line["message"] for line in lines() if line["logger"] == "shoal.test")


async def test_a_request_leaves_two_lines_with_its_figures(lines: Callable[[], list[dict[str, object]]]) -> None:
    async with Cluster() as cluster:
        done = await cluster.complete(request(max_tokens=3, visibility="speed:22", request_id="mine"))
        cluster.decode[0].fail_after = (1, Unavailable("lost"))
        await cluster.status(request(max_tokens=3, request_id="unlucky"))
        await cluster.status(request(max_tokens=3, visibility="speed:99", request_id="wrong"))
    mine = [line for line in lines() if line.get("request_id") == "mine" and line["level"] != "debug"]
    accepted, finished = mine
    assert accepted["message"] == "request accepted" and accepted["prompt_tokens"] == 10 and accepted["max_tokens"] == 3
    assert finished["message"] == "request finished" and finished["outcome"] == "length" and finished["completion_tokens"] == 3
    assert finished["visibility"] == done.visibility and finished["num_retries"] == 0 and finished["attempt_id"]
    assert finished["payload_bytes"] == done.transfer.payload_bytes > 0
    assert 0 < float(str(finished["ttft_s"])) <= float(str(finished["total_s"]))
    assert (finished["prefill_worker"], finished["decode_worker"]) == ("prefill-0", "decode-0")
    unlucky = [line for line in lines() if line.get("request_id") == "unlucky" and line["level"] != "debug"]
    events = [(str(line["message"]).split(":")[0], line["level"]) for line in unlucky]
    assert events == [("request accepted", "info"), ("retry", "warning"), ("request finished", "warning")]
    [wrong] = [line for line in lines() if line.get("request_id") == "wrong"]
    assert (wrong["outcome"], wrong["error"]) == ("invalid_argument", "InvalidRequest") and "visibility" not in wrong


async def test_a_caller_that_leaves_is_in_the_log(lines: Callable[[], list[dict[str, object]]]) -> None:
    async with Cluster() as cluster:
        cluster.decode[0].delay_s = 0.01
        call = cluster.stub.Generate(request(max_tokens=500, stream=True, request_id="left"))
        await call.read()
        call.cancel()
        await cluster.decode[0].idle()
        async with asyncio.timeout(2):
            while not (ends := [e for e in lines() if e["message"] == "request finished"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert [(end["outcome"], end["request_id"]) for end in ends] == [("cancelled", "left")]


def test_serve_relays_every_line_as_json() -> None:
    console = Console(file=io.StringIO(), width=40)
    progress = StartProgress(console, "json")
    progress.log('(prefill-0 epoch 7 pid=12) {"message": "worker ready"}')
    progress.log('(prefill-0 epoch 7 pid=12, ip=10.0.0.1) {"message": "worker ready"}')
    progress.log("(raylet) something of Ray's {")
    progress.log("3")
    seen = [json.loads(line) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert seen[:2] == [{"message": "worker ready"}] * 2
    assert [line["message"] for line in seen[2:]] == ["(raylet) something of Ray's {", "3"] and seen[3]["process"] == "serve"
