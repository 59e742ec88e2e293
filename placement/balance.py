"""Which worker takes a request: the one with the least outstanding work, ties at random. Pure functions over frozen views.

Work is measured in token-layers (placement/cost.py): tokens at the depth they cost, so shallow and deep requests compare.
Knows nothing of addresses, calls or time; whoever builds the views knows what is ready.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import Unavailable
from shoal.types import Fingerprint
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class WorkerLoadView:
    """One worker as a router sees it now.

    `allowed` holds policies (`Visibility.policy`, no boundary) as the operator wrote them; K = L counts as `full`.
    `outstanding_token_layers` is what the worker reported plus what the viewer sent it since.
    """

    worker_id: str
    fingerprint: Fingerprint
    allowed: frozenset[Visibility]
    max_boundary_tokens: int
    outstanding_token_layers: int
    is_ready: bool = True  # loaded, reachable, not draining
    held_token_layers: int = 0  # of the request at hand, what the worker has probably kept from earlier ones
    is_tripped: bool = False  # its breaker is open
    is_colocated: bool = False  # a decode worker that prefills every prompt itself

    @property
    def expected_token_layers(self) -> int:
        """What is compared: work it has, less what it need not do for the request at hand."""
        return self.outstanding_token_layers - self.held_token_layers

    def allows(self, visibility: Visibility) -> bool:
        """Whether the worker serves this resolved visibility: its policy is on the list and its boundary not too long."""
        num_layers = self.fingerprint.num_layers
        if (visibility.boundary_tokens or 1) > self.max_boundary_tokens:
            return False
        if visibility.depth(num_layers) > num_layers:
            return False
        return _policy(visibility, num_layers) in _policies(self.allowed, num_layers)


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The decode worker of a request, and the prefill worker that ships to it (None where decode runs all there is to run)."""

    decode: WorkerLoadView
    prefill: WorkerLoadView | None


def choose_worker(
    workers: Iterable[WorkerLoadView],
    visibility: Visibility,
    rng: random.Random,
    *,
    pool: str,
    fingerprint: Fingerprint | None = None,
    excluded: frozenset[str] = frozenset(),
) -> WorkerLoadView:
    """The ready worker with the least outstanding token-layers that allows `visibility` and has `fingerprint` (None = any).

    `excluded` are ids that have just failed this request. Raises Unavailable that says what every worker of `pool` lacks.
    """
    views = list(workers)
    candidates = [view for view in views if not _objections(view, visibility, fingerprint, excluded)]
    if not candidates:
        raise Unavailable(_nobody(views, visibility, fingerprint, excluded, pool))
    return _least_loaded(candidates, rng)


def choose_pair(
    decode_workers: Iterable[WorkerLoadView],
    prefill_workers: Iterable[WorkerLoadView],
    visibility: Visibility,
    rng: random.Random,
    *,
    needs_prefill: bool = True,
    excluded: frozenset[str] = frozenset(),
) -> WorkerPair:
    """Choose a decode worker, then a prefill worker with the equal fingerprint, both over what both allow (design §5.7).

    A decode worker without a partner is no candidate, so two fingerprints may live side by side during an upgrade; one that
    is colocated needs none. `needs_prefill` is False when there are no prefill tokens (P = 0), or decode runs them. Raises
    Unavailable with words.
    """
    decoders, prefillers = list(decode_workers), list(prefill_workers)
    if not needs_prefill:
        return WorkerPair(choose_worker(decoders, visibility, rng, pool="decode", excluded=excluded), None)
    willing = [view for view in decoders if not _objections(view, visibility, None, excluded)]
    if not willing:
        raise Unavailable(_nobody(decoders, visibility, None, excluded, "decode"))
    alone = [view for view in willing if view.is_colocated]
    partners = [view for view in prefillers if not _objections(view, visibility, None, excluded)]
    if not partners and not alone:
        raise Unavailable(_nobody(prefillers, visibility, None, excluded, "prefill"))
    fingerprints = {view.fingerprint for view in partners}
    paired = [view for view in willing if view.fingerprint in fingerprints or view in alone]
    if not paired:
        differences = "; ".join(willing[0].fingerprint.differences(partners[0].fingerprint))
        raise Unavailable(
            f"no decode worker matches a prefill worker: {willing[0].worker_id} and {partners[0].worker_id} differ in "
            f"{differences}; start both pools with the same model and settings"
        )
    decode = _least_loaded(paired, rng)
    if decode.is_colocated:
        return WorkerPair(decode, None)
    return WorkerPair(decode, _least_loaded([view for view in partners if view.fingerprint == decode.fingerprint], rng))


@lru_cache(maxsize=4096)
def _policy(visibility: Visibility, num_layers: int) -> Visibility:
    """What an allow-list compares, K = L counting as `full`."""
    return visibility.resolve(num_layers).policy


@lru_cache(maxsize=1024)
def _policies(allowed: frozenset[Visibility], num_layers: int) -> frozenset[Visibility]:
    """An allow-list for a model of L layers: K = L is `full`, and what is deeper than the model matches nothing."""
    return frozenset(_policy(entry, num_layers) for entry in allowed if entry.depth(num_layers) <= num_layers)


def _least_loaded(candidates: Sequence[WorkerLoadView], rng: random.Random) -> WorkerLoadView:
    least = min(view.expected_token_layers for view in candidates)
    best = [view for view in candidates if view.expected_token_layers == least]
    return best[0] if len(best) == 1 else rng.choice(best)


def _objections(view: WorkerLoadView, visibility: Visibility, fingerprint: Fingerprint | None, excluded: frozenset[str]) -> str:
    """Why a worker cannot take the request, in words; "" when it can."""
    if not view.is_ready:
        return "not ready"
    if view.is_tripped:
        return "has failed its last requests (its breaker is open)"
    if view.worker_id in excluded:
        return "just failed this request"
    if not view.allows(visibility):
        allowed = ", ".join(sorted(str(policy) for policy in view.allowed)) or "nothing"
        return f"does not allow {visibility} (allows {allowed}, boundary up to {view.max_boundary_tokens})"
    if fingerprint is not None and view.fingerprint != fingerprint:
        return f"differs in {'; '.join(view.fingerprint.differences(fingerprint))}"
    return ""


def _nobody(
    views: Sequence[WorkerLoadView],
    visibility: Visibility,
    fingerprint: Fingerprint | None,
    excluded: frozenset[str],
    pool: str,
) -> str:
    """The message when no worker of a pool qualifies, with the first few workers' objections."""
    if not views:
        return f"no {pool} worker is known; start one or wait for it to register"
    reasons = [f"{view.worker_id} {_objections(view, visibility, fingerprint, excluded)}" for view in views]
    more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return f"no {pool} worker can take this request: {'; '.join(reasons[:4])}{more}"
