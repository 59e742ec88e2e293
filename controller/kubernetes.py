"""A small client of the Kubernetes API: read, list, merge-patch, with deadlines and retries. Knows HTTP; knows no RayCluster.

Answers are mapped once, here: 401 and 403 Unauthenticated, 404 NotFound, 409 Conflict, 400 and 422 InvalidRequest. 429 (after the
time it names), 5xx and connections that fail are tried again until the deadline, then Unavailable. Patches carry the
resourceVersion that was read, so trying again is safe: what has been applied already is a Conflict, and is read anew.
"""

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from shoal.config.autoscale import AutoscaleConfig
from shoal.errors import InvalidConfig, InvalidRequest, NotFound, ShoalError, Unauthenticated, Unavailable
from shoal.metrics import counter

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FIRST_DELAY_S: Final = 0.2
_LONGEST_DELAY_S: Final = 5.0
_MAX_BYTES: Final = 64 << 20
_REQUESTS = counter("shoal_controller_kubernetes_requests_total", "Requests to the Kubernetes API, by status", ("verb", "status"))


class Conflict(Unavailable):
    """Somebody else changed the object since it was read: read it again."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API is, and how to prove who we are. Files are read for each request: tokens and CAs are rotated."""

    url: str
    token_file: Path | None
    ca_file: Path | None
    namespace: str

    @classmethod
    def of(cls, config: AutoscaleConfig, folder: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] = os.environ) -> Self:
        """As configured, else that of the cluster we run in. Raises InvalidConfig when we run in none."""
        if config.kubernetes_api:
            token_file, ca_file = config.kubernetes_token_file, config.kubernetes_ca_file
            access = cls(
                config.kubernetes_api.rstrip("/"),
                Path(token_file) if token_file else None,
                Path(ca_file) if ca_file else None,
                config.namespace or "default",
            )
        else:
            host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
            token, ca, own = folder / "token", folder / "ca.crt", folder / "namespace"
            if not host or not token.exists():
                raise InvalidConfig(
                    "autoscale_nodes kuberay: this process runs in no Kubernetes pod with a service account's token; run it "
                    "there (automountServiceAccountToken: true), or name the API with autoscale.kubernetes_api"
                )
            host = f"[{host}]" if ":" in host else host
            access = cls(f"https://{host}:{port}", token, ca, config.namespace or _text(own))
        for file in (access.token_file, access.ca_file):
            if file is not None:
                _text(file)
        return access


class KubernetesApi:
    """`timeout_s` bounds each call, retries included."""

    def __init__(self, access: Access, timeout_s: float) -> None:
        self.access = access
        self._timeout_s = timeout_s

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """Raises NotFound, Unauthenticated, Unavailable."""
        return await self._call("GET", path, query)

    async def merge_patch(self, path: str, body: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """The object as patched; `dry_run`: the API only checks. Raises Conflict, InvalidRequest and what `get` raises."""
        return await self._call("PATCH", path, {"dryRun": "All"} if dry_run else {}, body)

    async def _call(
        self, verb: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + self._timeout_s, _FIRST_DELAY_S
        while True:
            answer = await self._once(verb, path, query, body, max(0.1, deadline - loop.time()))
            if not isinstance(answer, _Again):
                return answer
            delay_s = max(delay_s, answer.after_s)
            if loop.time() + delay_s >= deadline:
                raise Unavailable(f"the Kubernetes API at {self.access.url} fails at {verb} {path}: {answer.words}")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _once(
        self, verb: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None, timeout_s: float
    ) -> "dict[str, Any] | _Again":
        import httpx2  # here: part of the `kubernetes` extra

        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}  # packed, a short answer may be huge
        if self.access.token_file is not None:
            headers["Authorization"] = f"Bearer {_text(self.access.token_file)}"
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            context = ssl.create_default_context(cafile=self.access.ca_file) if self.access.url.startswith("https:") else True
            async with (
                asyncio.timeout(timeout_s),  # the client's own bounds each read, not the whole
                httpx2.AsyncClient(verify=context, timeout=timeout_s, trust_env=False) as client,
                client.stream(verb, self.access.url + path, params=dict(query), headers=headers, json=body) as answer,
            ):
                content = bytearray()
                async for piece in answer.aiter_raw():
                    content += piece
                    if len(content) > _MAX_BYTES:
                        raise Unavailable(f"the Kubernetes API answers {verb} {path} with more than {_MAX_BYTES >> 20} MiB")
        except (httpx2.HTTPError, OSError) as error:
            _REQUESTS.labels(verb, "none").inc()
            return _Again(f"{type(error).__name__}: {error}".rstrip(": "))
        _REQUESTS.labels(verb, str(answer.status_code)).inc()
        text = content.decode(errors="replace")
        found = _json(text)
        words = str(found.get("message") or text[:200] or "no words")
        if answer.is_success:
            return found
        if answer.status_code == 429 or answer.status_code >= 500:
            after = answer.headers.get("Retry-After", "")
            return _Again(f"{answer.status_code}: {words}", float(after) if after.isascii() and after.isdigit() else 0.0)
        raise _error(answer.status_code, verb, path, words)


@dataclass(frozen=True, slots=True)
class _Again:
    """A failure that may pass."""

    words: str
    after_s: float = 0.0


def _error(status: int, verb: str, path: str, words: str) -> ShoalError:
    match status:
        case 401:
            return Unauthenticated(
                f"the Kubernetes API does not take our token ({words}); check the service account's, or the token file"
            )
        case 403:
            return Unauthenticated(
                f"the Kubernetes API forbids {verb} {path} ({words}); grant the controller's service account the rights that "
                f"docs/autoscaling.md lists"
            )
        case 404:
            return NotFound(f"the Kubernetes API knows no {path} ({words})")
        case 409:
            return Conflict(f"{path} has been changed by somebody else ({words})")
        case _:
            return InvalidRequest(f"the Kubernetes API refuses {verb} {path} with {status}: {words}")


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read {file}: {getattr(error, 'strerror', None) or 'not text'}") from None
