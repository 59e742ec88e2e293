"""How long a request waits in front of several equal workers, and how many workers keep that short. Pure arithmetic.

M/G/n by Allen and Cunneen's approximation (Allen, Probability, Statistics and Queueing Theory, 1990): with load a = rate · E[S]
an arrival waits with Erlang's probability C(n, a), and who waits does so for E[S]/(n − a) · (1 + CV²)/2 in the mean, here taken
as exponential. The live balancer sends each request where the least is owed, which comes near one common queue.
"""

import math
from collections.abc import Iterable


def erlang_c(num_workers: int, load: float) -> float:
    """Probability that an arrival waits; `load` in busy workers. 1.0 when the load is as much as they can do."""
    if load >= num_workers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion
    for n in range(1, num_workers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / num_workers * (1 - blocked))


def wait_s(num_workers: int, rate_per_s: float, mean_s: float, cv2: float, quantile: float) -> float:
    """The wait that so large a share of the requests does not exceed. Infinite when the workers cannot keep up."""
    load = rate_per_s * mean_s
    if load <= 0:
        return 0.0
    if load >= num_workers:
        return math.inf
    waits = erlang_c(num_workers, load)
    if waits <= 1 - quantile:
        return 0.0
    return mean_s / (num_workers - load) * (1 + cv2) / 2 * math.log(waits / (1 - quantile))


def workers_for_wait(rate_per_s: float, services_s: Iterable[tuple[float, float]], quantile: float, longest_s: float) -> int:
    """The fewest workers whose wait stays within `longest_s`. `services_s`: (share, seconds) of the requests.

    At least 1. With `longest_s` of 0 or less no number would do: then as many as keep most from waiting at all.
    """
    parts = list(services_s)
    mean_s = sum(share * seconds for share, seconds in parts)
    if rate_per_s <= 0 or mean_s <= 0:
        return 1
    cv2 = max(0.0, sum(share * seconds**2 for share, seconds in parts) / mean_s**2 - 1)
    num_workers = max(1, math.floor(rate_per_s * mean_s) + 1)
    while wait_s(num_workers, rate_per_s, mean_s, cv2, quantile) > max(0.0, longest_s):
        num_workers += 1
    return num_workers
