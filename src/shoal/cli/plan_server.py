"""Serves the planning page on loopback. Knows HTTP and the form's fields; the search is plan_search's.

Only this machine can reach it, and only its own page may ask: other Hosts and content types are refused, so that a web page
elsewhere cannot make the browser plan. Names only: no field opens a file.
"""

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import click

from shoal.cli.plan_search import solve
from shoal.cli.planning import DEFAULT_GPU, DEFAULT_LINK
from shoal.errors import InvalidConfig, ShoalError
from shoal.simulator.calibration.profile_file import is_profile_file
from shoal.simulator.page.render import render

_MAX_BODY: Final = 16_384
_MAX_REQUESTS: Final = 3_000
_LISTS: Final = {"gpus": "gpu_names", "gpus_per_worker": "tps", "links": "link_names", "visibilities": "texts"}
_TEXTS: Final = {
    "model": "model_name",
    "rate": "rate",
    "prompt_tokens": "prompt",
    "output_tokens": "answer",
    "ttft_target": "slo_ttft",
    "tpot_target": "slo_tpot",
    "quantile": "quantile",
}
_NUMBERS: Final = {"length_cv": "length_cv", "requests": "num_requests", "max_gpus": "max_gpus"}


def serve_pages(flags: dict[str, Any], port: int) -> None:
    """Serve until interrupted. `flags` fill the form and everything it does not ask for."""
    server = make_server(flags, port)
    click.echo(f"planning page: http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    finally:
        server.server_close()


def make_server(flags: dict[str, Any], port: int) -> ThreadingHTTPServer:
    """A server bound to loopback; port 0 takes any free one."""
    one_at_a_time = threading.Lock()
    page = render(None, form=_form(flags)).encode()

    class Handler(BaseHTTPRequestHandler):
        """GET / is the page, POST /plan a search."""

        def do_GET(self) -> None:
            if self.path != "/" or not self._is_local():
                self._reply(HTTPStatus.NOT_FOUND, b"not found", "text/plain")
                return
            self._reply(HTTPStatus.OK, page, "text/html; charset=utf-8")

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            is_json = self.headers.get("Content-Type", "").partition(";")[0] == "application/json"
            if self.path != "/plan" or not self._is_local() or not is_json:
                self._reply(HTTPStatus.NOT_FOUND, b"not found", "text/plain")
                return
            if not length.isdigit() or int(length) > _MAX_BODY:
                self._reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"too large", "text/plain")
                return
            try:
                asked = flags | parse_form(self.rfile.read(int(length)))
                with one_at_a_time:
                    body = solve(asked, sensitivity=True, watch=None).page()
                status = HTTPStatus.OK
            except ShoalError as error:
                body, status = {"error": str(error)}, HTTPStatus.BAD_REQUEST
            self._reply(status, json.dumps(body).encode(), "application/json")

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged per request."""

        def _is_local(self) -> bool:
            return self.headers.get("Host", "").rpartition(":")[0] in ("127.0.0.1", "localhost")

        def _reply(self, status: HTTPStatus, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def parse_form(body: bytes) -> dict[str, Any]:
    """The form's fields as flags of `shoal plan`. Raises InvalidConfig that names the field."""
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise InvalidConfig("the request is not JSON") from error
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise InvalidConfig("the request should be an object of texts")
    flags: dict[str, Any] = {"trace": None}
    for name, text in fields.items():
        text = text.strip()
        if "/" in text and name == "model":
            raise InvalidConfig("model: give a name of the catalogue; paths are for the command line")
        if name in _LISTS:
            flags[_LISTS[name]] = (text,) if text else ()
        elif name in _TEXTS:
            flags[_TEXTS[name]] = text
        elif name in _NUMBERS:
            flags[_NUMBERS[name]] = _number(name, text)
        else:
            raise InvalidConfig(f"the form has no field {name!r}")
    if flags.get("quantile", "0.95") not in ("0.5", "0.9", "0.95", "0.99"):
        raise InvalidConfig("quantile: one of 0.5, 0.9, 0.95, 0.99")
    if flags.get("num_requests", 1) > _MAX_REQUESTS:
        raise InvalidConfig(f"requests: at most {_MAX_REQUESTS:,} here; the command line takes more")
    return flags


def _number(name: str, text: str) -> float | int:
    try:
        return float(text) if name == "length_cv" else int(text)
    except ValueError:
        raise InvalidConfig(f"{name}: {text!r} is not a number") from None


def _form(flags: dict[str, Any]) -> dict[str, str]:
    fields = {name: str(flags[flag] or "") for name, flag in (_TEXTS | _NUMBERS).items()}
    fields["rate"] = fields["rate"] or "5/s"
    fields["requests"] = str(min(_MAX_REQUESTS, int(fields["requests"])))
    fields["length_cv"] = fields["length_cv"] or "0"
    defaults = {} if is_profile_file(flags["profile_name"] or "") else {"gpus": DEFAULT_GPU, "links": DEFAULT_LINK}
    return fields | {name: ",".join(flags[flag]) or defaults.get(name, "") for name, flag in _LISTS.items()}
