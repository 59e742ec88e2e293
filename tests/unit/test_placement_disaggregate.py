import pytest

from shoal.config.disaggregation import NEVER_LOCAL, DisaggregationRule
from shoal.errors import InvalidConfig
from shoal.placement.disaggregate import PrefillSite, SiteReason, choose_prefill_site

RULE = DisaggregationRule(local_prefill_tokens=100, local_cached_share=0.75)


@pytest.mark.parametrize(
    ("num_prefill", "num_cached", "reason"),
    [
        (0, 0, SiteReason.NOTHING_TO_RUN),
        (500, 500, SiteReason.NOTHING_TO_RUN),
        (99, 0, SiteReason.SHORT),
        (100, 0, SiteReason.LONG),
        (100, 1, SiteReason.SHORT),
        (1000, 749, SiteReason.LONG),
        (1000, 750, SiteReason.MOSTLY_CACHED),
        (1000, 901, SiteReason.SHORT),
    ],
)
def test_what_is_short_or_mostly_cached_stays_on_decode(num_prefill: int, num_cached: int, reason: SiteReason) -> None:
    choice = choose_prefill_site(RULE, num_prefill, num_cached)
    assert choice.reason is reason
    assert choice.is_local == (reason in (SiteReason.SHORT, SiteReason.MOSTLY_CACHED))
    assert (choice.site is PrefillSite.NOWHERE) == (reason is SiteReason.NOTHING_TO_RUN)


def test_without_a_rule_only_want_of_a_prefill_pool_makes_decode_prefill() -> None:
    for num_prefill in (1, 10**6):
        assert choose_prefill_site(NEVER_LOCAL, num_prefill, num_prefill - 1).site is PrefillSite.PREFILL_WORKER
        fallback = choose_prefill_site(NEVER_LOCAL, num_prefill, has_prefill_worker=False)
        assert fallback.is_local and fallback.reason is SiteReason.NO_PREFILL_WORKER
        colocated = choose_prefill_site(NEVER_LOCAL, num_prefill, is_colocated=True, has_prefill_worker=False)
        assert colocated.is_local and colocated.reason is SiteReason.COLOCATED


def test_more_in_the_cache_never_sends_a_prompt_away() -> None:
    """So the router may ask with c = 0: what is local then stays local, whatever decode holds."""
    for num_prefill in range(1, 300, 7):
        local = [choose_prefill_site(RULE, num_prefill, cached).is_local for cached in range(num_prefill)]
        assert local == sorted(local)


@pytest.mark.parametrize(("tokens", "share", "word"), [(-1, 1.0, "tokens"), (0, 0.0, "share"), (0, 1.5, "share")])
def test_values_that_mean_nothing_are_refused(tokens: int, share: float, word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        DisaggregationRule(tokens, share)
