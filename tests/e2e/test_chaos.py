"""The short form of `make chaos`: the same tool, cluster and verdict; a hundred requests and two strikes."""

from pathlib import Path

import pytest

from tests.chaos.plan import Deed
from tests.chaos.run import News, Setting, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(150)]


def test_a_little_chaos(tmp_path: Path) -> None:
    said: list[str] = []
    news = News(lambda outcome: None, lambda hit: said.append(str(hit)))
    deeds = frozenset({Deed.KILL, Deed.PAIR, Deed.ROUTER})
    result = run(Setting("random", 120, seed=12, rate=8.0, max_strikes=2, own_ray=False, deeds=deeds), tmp_path, news)
    assert not result.verdict.violations, (result.verdict.violations, said)
    assert len(said) >= 1 and result.verdict.counts["stayed: answered"] > 50
    assert result.idle_after_s is not None
