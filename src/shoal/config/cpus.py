"""CPUs by number, as operators write them: '0', '0-3', '0-3,8'. Knows no process; engine/affinity.py pins one."""

import re
from typing import Final

from shoal.errors import InvalidConfig

_RANGE: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def parse_cpus(text: str) -> tuple[int, ...]:
    """Sorted, each once; '' gives none. Raises InvalidConfig."""
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _RANGE.fullmatch(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise InvalidConfig(f"cannot read {text!r} as CPU numbers; write them as in 0-3,8")
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(cpus))
