"""A cluster that logs everything, as JSON: each process names the request, and no line holds what a client wrote or got."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.client import Client, Message, Sampling
from shoal.errors import ShoalError
from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

MARK = "zqxjkvbw"
TOKEN_IDS = [211, 223, 227, 229, 233, 239] * 4


def ask_everything(address: str) -> list[str]:
    """Marked requests of every kind, some refused; returns the answers' texts."""
    texts = []
    with Client(address) as client:
        done = client.complete(
            f"{MARK} why? " * 6, raw=True, visibility="speed:2", request_id="marked",
            sampling=Sampling(max_tokens=24, temperature=1.0, seed=3, stop=(f"{MARK}stop",)),
        )  # fmt: skip
        texts.append(done.text)
        texts.append(client.complete([Message("system", MARK), Message("user", MARK)], sampling=Sampling(max_tokens=24)).text)
        client.complete(token_ids=TOKEN_IDS, request_id="ids", sampling=Sampling(max_tokens=4))
        client.score(f"{MARK} a", f" {MARK} b", request_id="scored")
        assert client.tokenize(MARK, raw=True)
        refused: list[dict[str, Any]] = [
            {"prompt": MARK, "visibility": f"{MARK}:1"},
            {"prompt": MARK, "model": MARK},
            {"prompt": MARK * 4000},
            {"prompt": MARK, "sampling": Sampling(regex=f"({MARK}")},
            {"prompt": MARK, "sampling": Sampling(json_schema=json.dumps({"type": MARK}))},
        ]
        for number, options in enumerate(refused):
            with pytest.raises(ShoalError):
                client.complete(options.pop("prompt"), request_id=f"refused-{number}", **options)
    return texts


def ray_logs(cluster: Cluster) -> list[Path]:
    """Ray keeps what its processes print in files of its own."""
    commands = [" ".join(process.cmdline()) for process in cluster.descendants()]
    [folder] = {found for command in commands for found in re.findall(r"/tmp/shoal-ray-[^/\s=,]+", command)}
    return [path for path in Path(folder).rglob("*") if path.suffix in (".log", ".err", ".out")]


def test_every_process_names_the_request_and_no_line_holds_its_text(serve: Callable[..., Cluster], tiny_model: Path) -> None:
    options = ("--visibilities", "full,speed:2", "--kv-memory", "16MiB", "--log-level", "debug", "--log-format", "json")
    cluster = serve("--model", str(tiny_model), *options)
    texts = ask_everything(cluster.address)
    cluster.wait_until_idle()
    cluster.wait_for(lambda: cluster.log.read_text().count("reservation ended") >= 6)
    lines = [json.loads(line) for line in cluster.log.read_text().splitlines()]  # all of them are JSON
    told = {line["process"] for line in lines if line.get("request_id") == "marked"}
    assert told == {"router", "prefill-0", "decode-0"}
    attempts = {line["attempt_id"] for line in lines if line.get("request_id") == "marked" and "attempt_id" in line}
    assert len(attempts) == 1, "all of them name the same attempt"
    events = {(line["process"], line["message"]) for line in lines if line.get("request_id") == "marked"}
    for process in ("prefill-0", "decode-0"):
        assert {(process, what) for what in ("reservation made", "transfer finished", "reservation ended")} <= events
        assert any(line["message"] == "worker ready" and line["process"] == process for line in lines)
    assert {("router", "request accepted"), ("router", "request finished")} <= events
    refusals = [line["error"] for line in lines if str(line.get("request_id")).startswith("refused-")]
    assert len(refusals) == 5 and set(refusals) <= {"InvalidRequest", "NotFound", "Unsupported"}, "the class, without its words"
    written = [cluster.log, *ray_logs(cluster)]
    assert len(written) > 3
    ids = [", ".join(map(str, TOKEN_IDS[:3])), " ".join(map(str, TOKEN_IDS[:3])), ",".join(map(str, TOKEN_IDS[:3]))]
    secrets = [MARK, *ids, *(text[:12] for text in texts if len(text) >= 12)]
    assert len(secrets) > 4
    for path in written:
        content = path.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in content], path
