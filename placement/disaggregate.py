"""Where a prompt is prefilled: on a prefill worker, or on the decode worker itself. A pure rule over counts of tokens.

Short prompts, and prompts that decode mostly holds already, gain nothing from the way over another worker: the calls, the
transfer and a step of its own cost more than the tokens do. Images among the tokens to run are
for prefill workers alone, which have what turns pixels into tokens. Knows no load, no addresses, no clock.
"""

from dataclasses import dataclass
from enum import StrEnum

from shoal.config.disaggregation import NEVER_LOCAL, DisaggregationRule

__all__ = ["NEVER_LOCAL", "DisaggregationRule", "PrefillChoice", "PrefillSite", "SiteReason", "choose_prefill_site"]


class PrefillSite(StrEnum):
    """Who runs a request's prefill tokens."""

    NOWHERE = ""  # there are none, or decode holds them all
    PREFILL_WORKER = "prefill_worker"
    DECODE_WORKER = "decode_worker"


class SiteReason(StrEnum):
    """Why there."""

    NOTHING_TO_RUN = "nothing_to_run"
    LONG = "long"
    IMAGES = "images"  # only prefill workers can see them
    SHORT = "short"
    MOSTLY_CACHED = "mostly_cached"
    COLOCATED = "colocated"  # there is no prefill pool
    NO_PREFILL_WORKER = "no_prefill_worker"  # a fallback: none is live


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Where, and why."""

    site: PrefillSite
    reason: SiteReason

    @property
    def is_local(self) -> bool:
        return self.site is PrefillSite.DECODE_WORKER


def choose_prefill_site(
    rule: DisaggregationRule,
    num_prefill_tokens: int,
    num_cached_tokens: int = 0,
    *,
    is_colocated: bool = False,
    has_prefill_worker: bool = True,
    has_images: bool = False,
) -> PrefillChoice:
    """Where the P − c uncached prefill tokens of a request run. The more is cached, the more speaks for decode.

    `has_prefill_worker` False means that none is live and that the operator lets decode step in. `has_images`: some of these
    tokens stand for an image, so that neither load nor length matters.
    """
    num_to_run = num_prefill_tokens - num_cached_tokens
    if num_to_run <= 0:
        return PrefillChoice(PrefillSite.NOWHERE, SiteReason.NOTHING_TO_RUN)
    if has_images:
        return PrefillChoice(PrefillSite.PREFILL_WORKER, SiteReason.IMAGES)
    if is_colocated:
        return PrefillChoice(PrefillSite.DECODE_WORKER, SiteReason.COLOCATED)
    if num_to_run < rule.local_prefill_tokens:
        return PrefillChoice(PrefillSite.DECODE_WORKER, SiteReason.SHORT)
    if num_cached_tokens >= rule.local_cached_share * num_prefill_tokens:
        return PrefillChoice(PrefillSite.DECODE_WORKER, SiteReason.MOSTLY_CACHED)
    if not has_prefill_worker:
        return PrefillChoice(PrefillSite.DECODE_WORKER, SiteReason.NO_PREFILL_WORKER)
    return PrefillChoice(PrefillSite.PREFILL_WORKER, SiteReason.LONG)
