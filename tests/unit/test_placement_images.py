"""Images in placement: what a cached prefix with them is called, and where their prompts are prefilled."""

from shoal.config.disaggregation import DisaggregationRule
from shoal.placement.disaggregate import PrefillSite, SiteReason, choose_prefill_site
from shoal.placement.prefix_keys import PrefixChain, anchors_digest
from shoal.types import ImageSpan

ROOT, SIZE = b"root", 4
IDS = [1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9, 6, 7, 8, 1, 2]  # 9: six tokens of an image, from 5 on


def image(name: int, start: int = 5, num_tokens: int = 6) -> ImageSpan:
    return ImageSpan(start, num_tokens, bytes([name]) * 32)


def digests(*images: ImageSpan) -> list[bytes]:
    return PrefixChain(ROOT, SIZE, IDS, images).digests


def test_blocks_are_shared_up_to_the_image_that_differs() -> None:
    plain, one, other = digests(), digests(image(1)), digests(image(2))
    assert plain == PrefixChain(ROOT, SIZE, IDS).digests
    assert plain[0] == one[0] == other[0]
    for block in (1, 2, 3):
        assert len({plain[block], one[block], other[block]}) == 3
    assert digests(image(1)) == one
    halves = digests(image(1, 5, 3), image(1, 8, 3))  # the same file twice is not one of twice the size
    assert halves[1] != one[1]


def test_a_chain_that_grows_or_forks_names_blocks_as_one_made_at_once() -> None:
    at_once = digests(image(1))
    grown = PrefixChain(ROOT, SIZE, IDS[:6], [image(1)])
    twin = grown.fork()
    for chain in (grown, twin):
        chain.extend(IDS[6:])
        assert chain.digests == at_once


def test_anchors_that_hold_an_image_are_named_by_it() -> None:
    assert anchors_digest(ROOT, IDS[:4]) == anchors_digest(ROOT, IDS[:4], [image(1)])
    named = {anchors_digest(ROOT, IDS[:7], images) for images in ([], [image(1)], [image(2)])}
    assert len(named) == 3


def test_images_to_run_are_for_prefill_workers_whatever_else_holds() -> None:
    rule = DisaggregationRule(local_prefill_tokens=100, local_cached_share=0.75)
    for is_colocated in (False, True):
        for has_prefill_worker in (False, True):
            choice = choose_prefill_site(
                rule, 10, 9, is_colocated=is_colocated, has_prefill_worker=has_prefill_worker, has_images=True
            )
            assert (choice.site, choice.reason) == (PrefillSite.PREFILL_WORKER, SiteReason.IMAGES)
    assert choose_prefill_site(rule, 10, 10, has_images=True).site is PrefillSite.NOWHERE
