"""How a command ends when something went wrong: one line on stderr and an exit code. Knows the error tree; no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shoal.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Mismatch,
    NotFound,
    ShoalError,
    Unavailable,
    Unsupported,
)

EXIT_CODES_HELP: Final = (
    "Exit codes: 0 done, 1 failed, 2 the input cannot work as given, 3 no server or no worker, 4 no room now, 5 out of time, "
    "130 interrupted."
)
_INTERRUPTED: Final = 130


def exit_code(error: ShoalError) -> int:
    """What a script may branch on."""
    match error:
        case InvalidRequest() | NotFound() | Mismatch() | Unsupported():
            return 2
        case Unavailable():
            return 3
        case CapacityExceeded():
            return 4
        case DeadlineExceeded():
            return 5
    return 1


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Run a command's body; its errors become one line and an exit code."""
    try:
        yield
    except ShoalError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left; Python would complain once more at exit
        sys.exit(1)
