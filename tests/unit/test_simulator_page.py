"""The planning page: one file without network, data that cannot break out of it, and a server that only its own page can use."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.cli.plan import plan
from shoal.cli.plan_server import make_server, parse_form
from shoal.errors import InvalidConfig
from shoal.simulator.page.render import render

FLAGS = ["--model", "llama-3.1-8b", "--rate", "15/s", "--prompt", "4k", "--output", "40", "--requests", "60", "--no-sensitivity"]
FLAGS += ["--slo-ttft", "600ms", "--slo-tpot", "20ms", "--visibility", "full,speed:24"]


def embedded(page: str) -> dict[str, Any]:
    match = re.search(r"window\.DOCUMENT = (.*?); window\.FORM", page)
    assert match
    document: dict[str, Any] = json.loads(match[1])
    return document


def test_the_page_is_one_file_with_all_it_draws(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = CliRunner().invoke(cli, ["plan", *FLAGS, "--html", str(path)])
    assert result.exit_code == 0, result.output
    page = path.read_text()
    assert "@@" not in page and not re.search(r"(src|href)=[\"']?http", page) and "default-src 'none'" in page
    assert "connect-src 'none'" in page and "Chart.js" in page
    document = embedded(page)
    assert document["advice"].splitlines()[0] in result.output
    assert document["plans"][document["best"]]["meets"] and document["front"]
    split = next(each for each in document["plans"] if each["name"].startswith("speed:24:"))
    layers = split["timeline"]["layers"]
    assert [row["name"] for row in layers] == [f"layer {layer}" for layer in range(24)] + ["deep states"]
    assert all(row["first_ready_ms"] <= row["last_ready_ms"] <= row["done_ms"] for row in layers)
    memory = split["memory"]
    assert memory["depth"] == 24 and memory["upper_prompt_bytes"] == 8 * 4096 and memory["lower_prompt_bytes"] == 24 * 4095 * 4096
    assert len(split["ttft_curve_ms"]) == 41 and split["ttft_curve_ms"] == sorted(split["ttft_curve_ms"])


def test_data_cannot_end_its_script_and_infinities_are_null() -> None:
    page = render({"advice": "</script><script>alert(1)</script>@@SCRIPT@@", "x": float("inf"), "y": [float("-inf"), 1.5]})
    assert "</script><script>alert" not in page
    document = embedded(page)
    assert document["advice"].startswith("</script>") and document["x"] is None and document["y"] == [None, 1.5]


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    context = plan.make_context("plan", list(FLAGS))
    flags = {key: value for key, value in context.params.items() if key not in ("output", "sensitivity", "html", "serve", "port")}
    server = make_server(flags, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield "127.0.0.1", server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def ask(address: tuple[str, int], method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=120)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, named)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_the_server_sends_the_page_and_plans_on_request(address: tuple[str, int]) -> None:
    status, page = ask(address, "GET", "/")
    assert status == 200 and "connect-src 'self'" in page and '"ttft_target": "600ms"' in page
    form = {"rate": "10/s", "requests": "40", "visibilities": "speed:24", "prompt_tokens": "2k"}
    status, body = ask(address, "POST", "/plan", json.dumps(form), Content_Type="application/json")
    assert status == 200 and json.loads(body)["plans"]
    form["ttft_target"] = "1ms"
    status, body = ask(address, "POST", "/plan", json.dumps(form), Content_Type="application/json")
    assert status == 400 and "over the target of 1 ms" in json.loads(body)["error"]


def test_the_server_refuses_other_pages_and_paths(address: tuple[str, int]) -> None:
    assert ask(address, "GET", "/etc/passwd")[0] == 404
    assert ask(address, "GET", "/", Host="evil.example:80")[0] == 404
    assert ask(address, "POST", "/plan", "{}", Content_Type="text/plain")[0] == 404
    assert ask(address, "POST", "/plan", "{}", Content_Type="application/json", Host="evil.example:80")[0] == 404
    assert ask(address, "POST", "/plan", "x" * 20_000, Content_Type="application/json")[0] == 413


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"not json", "not JSON"),
        (b"[]", "object of texts"),
        (b'{"trace": "/etc/passwd"}', "no field 'trace'"),
        (b'{"model": "/tmp/config.json"}', "paths are for the command line"),
        (b'{"requests": "many"}', "'many' is not a number"),
        (b'{"requests": "100000"}', "at most 3,000"),
        (b'{"quantile": "0.97"}', "one of 0.5"),
    ],
)
def test_forms_are_checked(body: bytes, words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        parse_form(body)
