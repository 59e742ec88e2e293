"""Remembers desired sizes beside the actors, in Ray, so that a restarted controller goes on with them. Knows no keeper.

Sizes are those of an order (`shoal scale`, an autoscaler) as long as the configured sizes are what they were when it was given:
whoever changes the configuration means the new one.
"""

import json
import logging
from collections.abc import Mapping
from typing import Protocol

from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.errors import Unavailable

_log = logging.getLogger(__name__)
_KEY = "pool-sizes"


class Notes(Protocol):
    """Where texts are kept as long as the actors live."""

    def remember(self, key: str, text: str) -> None: ...
    def recall(self, key: str) -> str: ...


class SizeBook:
    """Reads once, at start; writes at each order."""

    def __init__(self, notes: Notes, config: ServeConfig) -> None:
        self._notes = notes
        self._configured = {str(pool): config.num_workers(pool) for pool in Pool}

    def read(self) -> dict[Pool, int]:
        """Of the last order, if it was given under this configuration; else the configured ones."""
        sizes = self._configured
        try:
            noted = json.loads(self._notes.recall(_KEY) or "{}")
            if noted and noted["configured"] == self._configured:
                sizes = {str(pool): int(noted["desired"][str(pool)]) for pool in Pool}
                if sizes != self._configured:
                    _log.info("pools keep the sizes they were scaled to: %s", sizes)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("the noted pool sizes cannot be read (%s); using the configured ones", error)
        return {pool: sizes[str(pool)] for pool in Pool}

    def write(self, desired: Mapping[Pool, int]) -> None:
        note = {"configured": self._configured, "desired": {str(pool): size for pool, size in desired.items()}}
        self._note(json.dumps(note))

    def forget(self) -> None:
        """The workers have been ended in order: the next controller starts from its configuration."""
        self._note("")

    def _note(self, text: str) -> None:
        try:
            self._notes.remember(_KEY, text)
        except Unavailable as error:
            _log.warning("pool sizes cannot be noted; a restarted controller would not know them: %s", error)
