"""The search for worker counts finds what trying everything finds, whatever leads it astray; and so does the whole plan."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.simulator.cluster.spec import Slo
from shoal.simulator.planning.bounds import bounds
from shoal.simulator.planning.candidates import families
from shoal.simulator.planning.search import evaluate, search
from shoal.simulator.planning.worker_counts import Numbers, fewest
from tests.unit.test_simulator_planning import demand, options, resolved

MOST = 9


@given(
    st.lists(st.tuples(st.integers(1, MOST), st.integers(1, MOST)), max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.floats(0.5, 3), st.floats(0.5, 3)),
    st.lists(st.sampled_from([(0, 1), (1, 0), (1, 1), (3, 0), (0, 2)]), min_size=1, max_size=5),
    st.integers(4, 2 * MOST),
)
def test_it_finds_what_trying_everything_finds(
    corners: list[Numbers], least: Numbers, prices: tuple[float, float], steps: list[Numbers], most: int
) -> None:
    """The accepted pairs are all that are at least as large as some corner; the climb is led anywhere."""
    asked: list[Numbers] = []
    ways = itertools.cycle(steps)

    def judge(numbers: Numbers) -> bool:
        asked.append(numbers)
        return any(numbers[0] >= p and numbers[1] >= d for p, d in corners)

    def cost(numbers: Numbers) -> float:
        return numbers[0] * prices[0] + numbers[1] * prices[1]

    found = fewest(least, judge=judge, short_of=lambda _: next(ways), cost=cost, allowed=lambda numbers: sum(numbers) <= most)
    grid = [(p, d) for p in range(least[0], most + 1) for d in range(least[1], most + 1) if p + d <= most]
    able = [pair for pair in grid if any(pair[0] >= p and pair[1] >= d for p, d in corners)]
    assert (found is None) == (not able)
    if found is not None:
        assert found in able and cost(found) == min(map(cost, able))
    assert len(set(asked)) <= len(grid)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 12))
def test_colocated_counts_are_one_dimension(needed: int, least: int, most: int) -> None:
    found = fewest(
        (0, least),
        judge=lambda numbers: numbers[1] >= needed,
        short_of=lambda _: (0, 1),
        cost=lambda numbers: float(numbers[1]),
        allowed=lambda numbers: numbers[1] <= most,
    )
    wanted = max(needed, least)
    assert found == ((0, wanted) if wanted <= most else None)


@pytest.mark.parametrize(
    ("rate", "prompt", "slo"), [(25.0, 6000, Slo(0.5, 0.012)), (40.0, 2000, Slo(0.25, 0.009)), (10.0, 12_000, Slo(1.5, 0.03))]
)
def test_the_plan_is_the_cheapest_of_a_small_grid(rate: float, prompt: int, slo: Slo) -> None:
    asked, given_options = demand(rate, 100, prompt), options(slo=slo, max_gpus=9, visibilities=resolved("full", "speed:24"))
    found = search(given_options, asked).best
    assert found is not None
    cheapest = []
    for family in families(given_options):
        limit = bounds(family, asked, given_options.quantile)
        for prefill, decode in itertools.product(range(10), range(1, 10)):
            fits = prefill + decode <= 9 and prefill >= limit.num_prefill and decode >= limit.num_decode
            if not fits or bool(prefill) == family.is_colocated or family.cost(prefill, decode)[0] >= found.cost:
                continue
            plan = evaluate(family, prefill, decode, asked, given_options.quantile, 0)
            if plan.meets:
                cheapest.append((plan.cost, family.visibility, prefill, decode))
    assert not cheapest, f"cheaper than {found.price}: {min(cheapest, key=lambda each: each[0])}"
