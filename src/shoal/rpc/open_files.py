"""How many files and connections this process may have open at once. Knows the kernel's limits; no server."""

import resource
from typing import Final

_ENOUGH: Final = 65_536  # more would only make lists of descriptors long


def raise_open_files() -> int:
    """Raise the soft limit to the hard one, which costs nothing; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
