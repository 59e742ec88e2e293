"""Whatever way the controller ends, its Ray ends with it. Knows fork, signals and descendants; knows no Ray.

An orderly controller ends its Ray itself. One that is killed, or that Ray's own code ends in the midst of it, cannot: its
parent, which does nothing else, then does.
"""

import os
import signal
import sys

from shoal.controller.descendants import adopt_orphans, die_with_parent, end_descendants


def guard() -> None:
    """Fork. The child returns and goes on; the parent waits, ends what the child left, and exits as the child did.

    Call it before any thread runs. SIGTERM and SIGINT are passed on to the child.
    """
    if sys.platform != "linux":
        return
    adopt_orphans()
    guarded = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, guarded)  # none may come between the fork and the handlers
    child = os.fork()
    if child == 0:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, guarded)
        return
    for signum in guarded:
        signal.signal(signum, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, guarded)
    _, status = os.waitpid(child, 0)
    for signum in guarded:
        signal.signal(signum, signal.SIG_IGN)
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):  # whose handling cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
