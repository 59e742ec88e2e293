"""Which `shoal serve` of this user listens where, and how its controller is reached. Knows one small file for each; no process.

The files hold addresses and paths, no secret. One whose process has ended counts for nothing and is deleted by who finds it.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shoal.cli.cluster_secret import state_folder
from shoal.config.tls import ClusterConfig
from shoal.controller.owner import Owner
from shoal.errors import NotFound


@dataclass(frozen=True, slots=True)
class Service:
    """A running `shoal serve`."""

    listen: tuple[str, ...]  # of its routers
    controller: str
    cluster: ClusterConfig

    def publish(self) -> "Published":
        """Let commands of this user find it until this process ends. Raises InvalidConfig when that cannot be written."""
        path = state_folder("services") / f"{os.getpid()}.json"
        text = json.dumps({"owner": str(Owner.me()), **asdict(self)})
        new = path.with_name(f".{path.name}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        new.rename(path)
        return Published(path)

    @classmethod
    def at(cls, address: str) -> Self:
        """The one that listens there. Raises NotFound that names those that run."""
        running = list(cls.running())
        for service in running:
            if address in service.listen:
                return service
        others = ", ".join(address for service in running for address in service.listen)
        known = f"those that run listen at {others}" if others else "none runs"
        raise NotFound(
            f"no `shoal serve` of this user and machine listens at {address} ({known}); give its --address, or --controller "
            f"with --cluster-secret-file"
        )

    @classmethod
    def running(cls) -> Iterator[Self]:
        """Those whose process lives."""
        for path in sorted(state_folder("services").glob("[0-9]*.json")):
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                owner = Owner.read(values["owner"])
                if owner is None or owner.is_gone:
                    path.unlink(missing_ok=True)
                    continue
                yield cls(tuple(values["listen"]), values["controller"], ClusterConfig(**values["cluster"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # being replaced, or not ours


@dataclass(frozen=True, slots=True)
class Published:
    """A service that can be found."""

    path: Path

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
