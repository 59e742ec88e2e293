"""Finds an entry by the name people type. Knows spellings; knows nothing of what is named."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from shoal.errors import NotFound

Value = TypeVar("Value")


def normalised(name: str) -> str:
    """Lower case, letters and digits only, so that `Llama 3.1 8B` and `llama-3.1-8b` are one name."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def find(name: str, entries: Mapping[str, Value], what: str, hint: str) -> Value:
    """The entry called `name`, or the only one that begins so. Raises NotFound with the nearest names and `hint`."""
    keys = {normalised(key): key for key in entries}
    wanted = normalised(name)
    if wanted in keys:
        return entries[keys[wanted]]
    beginning = [key for key in keys if wanted and not wanted.isdigit() and key.startswith(wanted)]
    if len({id(entries[keys[key]]) for key in beginning}) == 1:
        return entries[keys[beginning[0]]]
    near = beginning or difflib.get_close_matches(wanted, list(keys), n=4, cutoff=0.5) or list(keys)
    raise NotFound(f"no {what} is called {name!r}; nearest: {', '.join(unique(keys[key] for key in near)[:6])}; {hint}")


def unique(names: Iterable[str]) -> list[str]:
    """The names, each once, in order."""
    return list(dict.fromkeys(names))
