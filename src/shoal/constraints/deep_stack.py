"""Runs a call on a deep stack of its own. Knows threads.

llguidance follows rules that refer to rules by recursion: a few thousand of them overflow an ordinary stack, which ends the
process. The stack here holds what a constraint of the permitted length can ask for; memory is taken only as it is used.
"""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

Result = TypeVar("Result")

_STACK_BYTES: Final = 256 << 20
_changing_size = threading.Lock()


def on_deep_stack(call: Callable[[], Result]) -> Result:
    """What the call returns; what it raises is raised here."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  # raised again below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="constraint-compile", daemon=True)
    with _changing_size:  # the size is the process's: it holds for threads started meanwhile, which does no harm
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
