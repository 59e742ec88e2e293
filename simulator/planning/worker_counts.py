"""The cheapest pair of worker counts that a judge accepts, asking it seldom. Knows numbers; knows no cluster.

It rests on one assumption, which simulation bears out but for ties: with more workers of either kind a cluster that meets its
targets goes on meeting them. So whatever is smaller than a pair that failed fails as well.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

Numbers: TypeAlias = tuple[int, int]  # prefill (0: colocated), decode
Judge = Callable[[Numbers], bool]


def fewest(
    least: Numbers,
    *,
    judge: Judge,
    short_of: Callable[[Numbers], Numbers],
    cost: Callable[[Numbers], float],
    allowed: Judge,
) -> Numbers | None:
    """The cheapest accepted pair of at least `least`; None when no allowed pair is accepted.

    `short_of` says what to add to a pair that failed; it may lead astray, which costs time and not the result.
    """
    failed: list[Numbers] = []
    best = _climb(least, judge, short_of, allowed, failed)
    if best is None and least[0]:
        best = _on_the_edge(least, judge, allowed)
    while best is not None:
        cheaper = _cheaper(least, cost(best), cost, allowed, failed)
        for numbers in cheaper:
            if _is_ruled_out(numbers, failed):
                continue
            if judge(numbers):
                best = numbers
                break
            failed.append(numbers)
        else:
            return best
    return None


def _climb(
    least: Numbers, judge: Judge, short_of: Callable[[Numbers], Numbers], allowed: Judge, failed: list[Numbers]
) -> Numbers | None:
    numbers = least
    while allowed(numbers):
        if judge(numbers):
            return numbers
        failed.append(numbers)
        more = short_of(numbers)
        numbers = numbers[0] + more[0], numbers[1] + more[1]
    return None


def _on_the_edge(least: Numbers, judge: Judge, allowed: Judge) -> Numbers | None:
    """The climb ran into a limit: perhaps with other proportions. The largest allowed pairs, even ones first."""
    edge = []
    prefill = least[0]
    while allowed((prefill, least[1])):
        decode = least[1]
        while allowed((prefill, decode + 1)):
            decode += 1
        edge.append((prefill, decode))
        prefill += 1
    largest = [pair for pair in edge if not any(a >= pair[0] and b >= pair[1] and (a, b) != pair for a, b in edge)]
    return next((pair for pair in sorted(largest, key=lambda pair: abs(pair[0] - pair[1])) if judge(pair)), None)


def _cheaper(
    least: Numbers, limit: float, cost: Callable[[Numbers], float], allowed: Judge, failed: list[Numbers]
) -> Iterator[Numbers]:
    """Pairs that cost less than `limit`, dearest first: one that fails rules out the most."""
    found = []
    prefill = least[0]
    while cost((prefill, least[1])) < limit:
        decode = least[1]
        while cost((prefill, decode)) < limit:
            if allowed((prefill, decode)):
                found.append((prefill, decode))
            decode += 1
        if not prefill:
            break
        prefill += 1
    return iter(sorted(found, key=lambda pair: (-cost(pair), pair)))


def _is_ruled_out(numbers: Numbers, failed: list[Numbers]) -> bool:
    return any(numbers[0] <= prefill and numbers[1] <= decode for prefill, decode in failed)
