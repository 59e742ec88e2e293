"""A cluster that logs everything, as JSON: each process names the request, and no line holds what a client wrote or got."""

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.cli.preflight import free_port
from shoal.client import Chunk, Client, Message, Retry, Sampling
from shoal.errors import ShoalError
from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

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


LONG = Sampling(max_tokens=600, ignore_eos=True)
BODIES = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "tools": [{"function": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "temperature": MARK}),
    ("/v1/completions", {"prompt": [MARK, MARK], "logit_bias": {MARK: 1}, "stop": MARK}),
    ("/v1/completions", {"prompt": MARK, MARK: MARK}),
    ("/v1/completions", {"prompt": MARK, "visibility": MARK, "user": MARK}),
    ("/tokenize", {"prompt": MARK, "add_special_tokens": MARK}),
    (f"/{MARK}", {"prompt": MARK}),
)


def post(url: str, body: bytes) -> str:
    """What an HTTP request gets, refused or not."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def fail_in_every_way(cluster: Cluster, http: str) -> list[str]:
    """Bodies good and bad, a deadline, a client that leaves, a killed worker; returns what another client was told meanwhile."""
    for path, body in BODIES:
        post(http + path, json.dumps(body).encode())
    post(f"{http}/v1/completions", f'{{"prompt": "{MARK}", '.encode())
    post(f"{http}/v1/completions", f'{{"prompt": "{MARK}'.encode() + b"\xff")
    once = Retry(attempts=1)
    with Client(cluster.address, retry=once) as client:
        with suppress(ShoalError):
            client.complete(MARK, sampling=LONG, timeout_s=0.2, request_id="late")
        leaving = client.generate(MARK, sampling=LONG, request_id="left")
        next(leaving)
        leaving.close()  # type: ignore[attr-defined]
    told: list[str] = []
    begun = threading.Event()

    def ask(prompt: str, words: list[str]) -> None:
        try:
            with Client(cluster.address, retry=once) as client:
                for event in client.generate(prompt, sampling=LONG, timeout_s=30):
                    begun.set()
                    words.append(event.text if isinstance(event, Chunk) else str(event))
        except ShoalError as error:
            words.append(str(error))

    both = [threading.Thread(target=ask, args=arguments) for arguments in ((MARK, []), ("another's words", told))]
    for thread in both:
        thread.start()
    assert begun.wait(20)
    epoch = cluster.workers()["decode-0"].epoch
    cluster.worker_process("decode-0").kill()
    for thread in both:
        thread.join(60)
    cluster.wait_for(lambda: (new := cluster.workers().get("decode-0")) and new.epoch > epoch and new.state == "ready", 90)
    return told


def processes(cluster: Cluster) -> list[str]:
    """What anybody on the machine may read of the cluster's processes: command lines; and their environments."""
    seen = []
    for process in cluster.descendants():
        with suppress(psutil.Error):
            seen.append(" ".join([*process.cmdline(), *process.environ().values()]))
    return seen


def ray_logs(cluster: Cluster) -> list[Path]:
    """Ray keeps what its processes print in files of its own."""
    commands = [" ".join(process.cmdline()) for process in cluster.descendants()]
    [folder] = {found for command in commands for found in re.findall(r"/tmp/shoal-ray-[^/\s=,]+", command)}
    return [path for path in Path(folder).rglob("*") if path.suffix in (".log", ".err", ".out")]


def test_every_process_names_the_request_and_no_line_holds_its_text(serve: Callable[..., Cluster], tiny_model: Path) -> None:
    options = ("--visibilities", "full,speed:2", "--kv-memory", "16MiB", "--log-level", "debug", "--log-format", "json")
    http, metrics = f"127.0.0.1:{free_port('127.0.0.1')}", free_port("127.0.0.1")
    cluster = serve("--model", str(tiny_model), "--http-listen", http, "--metrics-port", str(metrics), *options)
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
    others = fail_in_every_way(cluster, f"http://{http}")
    assert others
    written = [cluster.log, *ray_logs(cluster)]
    assert len(written) > 3
    ids = [", ".join(map(str, TOKEN_IDS[:3])), " ".join(map(str, TOKEN_IDS[:3])), ",".join(map(str, TOKEN_IDS[:3]))]
    secrets = [MARK, *ids, *(text[:12] for text in texts if len(text) >= 12)]
    assert len(secrets) > 4
    pages = [http, *(f"127.0.0.1:{metrics + offset}" for offset in range(4))]
    seen = {page: urllib.request.urlopen(f"http://{page}/metrics", timeout=10).read().decode() for page in pages}
    assert all("shoal_build_info" in text for text in seen.values())
    seen |= {str(path): path.read_text(errors="replace") for path in written}
    seen |= {f"process {number}": text for number, text in enumerate(processes(cluster))}
    seen["another client"] = " ".join(others)
    assert not [(secret, where) for where, text in seen.items() for secret in secrets if secret in text]
