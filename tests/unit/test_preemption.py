"""Who gives way: the least senior, and never the most senior while anyone else holds a block."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.placement.preemption import Holder, choose_victim, headroom_blocks, num_first_tokens

HOLDERS = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 10)), min_size=1, max_size=8)


@given(HOLDERS)
def test_the_least_senior_gives_way(ranks: list[tuple[int, float]]) -> None:
    holders = [Holder(str(index), rank, arrived) for index, (rank, arrived) in enumerate(ranks)]
    victim = choose_victim(reversed(holders))
    assert victim == choose_victim(holders)
    assert all(victim.rank < other.rank or victim.arrived_s >= other.arrived_s for other in holders if other.rank >= victim.rank)
    most_senior = min(holders, key=lambda holder: holder.seniority)
    assert len(holders) == 1 or victim != most_senior


@given(HOLDERS)
def test_taking_victims_one_by_one_leaves_the_oldest_of_the_highest_class(ranks: list[tuple[int, float]]) -> None:
    holders = [Holder(str(index), rank, arrived) for index, (rank, arrived) in enumerate(ranks)]
    while len(holders) > 1:
        holders.remove(choose_victim(holders))
    assert (holders[0].rank, -holders[0].arrived_s) == max((rank, -arrived) for rank, arrived in ranks)


def test_what_is_reserved_first() -> None:
    assert [num_first_tokens(100, replayed, 16) for replayed in (0, 20, 90)] == [16, 36, 100]
    assert headroom_blocks(3, 30) == 90
