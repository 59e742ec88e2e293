"""A cluster that scales itself: decode grows under load and shrinks by a drain when it is over, and no request is lost."""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.local import LocalResult
from tests.e2e.test_system import Case, make_cases, reference
from tests.e2e.test_system_scale import load, order

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE_S = 90.0
SETTINGS = {  # four clients fill a decode worker of four places; what else the rule weighs is given room
    "interval_s": 0.25, "ttft_s": 60.0, "tpot_s": 10.0, "up_cooldown_s": 0.0, "down_cooldown_s": 1.0, "start_s": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One worker in each pool; decode may have two. Two routers, as the load of the other scaling tests has it."""
    file = tmp_path_factory.mktemp("autoscale") / "serve.yaml"
    file.write_text(json.dumps({"autoscale": SETTINGS}))
    yield serve(
        *("--model", str(tiny_model), "--visibilities", "full,speed:2", "--routers", "2", "--max-requests", "4"),
        *("--config", str(file), "--autoscale-decode", "1-2", "--grace-s", "0.2"),
    )


@pytest.fixture(scope="module")
def cases(tiny_model: Path) -> list[tuple[Case, LocalResult]]:
    own = make_cases(str(tiny_model), ["full:boundary=1", "speed:2:boundary=2"], 120, 150)[:12]
    return list(zip(own, reference(str(tiny_model), own), strict=True))


def has_decode_workers(cluster: Any, count: int) -> bool:
    """All ready, beside one of prefill. A pool that grows while one of its workers still drains gives the next a new number."""
    workers = cluster.workers()
    num_decode = sum(name.startswith("decode-") for name in workers)
    return len(workers) == 1 + count == 1 + num_decode and all(worker.state == "ready" for worker in workers.values())


async def test_decode_grows_under_load_and_shrinks_by_a_drain_and_loses_nothing(
    cluster: Any, cases: list[tuple[Case, LocalResult]]
) -> None:
    async with load(cluster, cases) as seen:
        await asyncio.to_thread(cluster.wait_for, partial(has_decode_workers, cluster, 2), PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while not seen.served_by("decode-1"):  # noqa: ASYNC110  (clients fill a list)
                await asyncio.sleep(0.02)
        status, output = await order(cluster, "autoscale", "--json")
        decision = json.loads(output)
        assert (status, decision["pool"], decision["bounds"]) == (0, "decode", [1, 2]) and decision["seen"]["rows"] > 0, output
        status, output = await order(cluster, "autoscale")
        assert status == 0 and "decode: " in output and "bounds 1-2" in output, output
        print(output)
        # fewer by order, under load: it goes by a drain, what it runs goes on elsewhere, and the pool grows again
        status, output = await order(cluster, "scale", "--decode", "1", "--drain-s", "0")
        assert status == 0 and "decode-1: gone" in output, output
        await asyncio.to_thread(cluster.wait_for, partial(has_decode_workers, cluster, 2), PATIENCE_S)
    await asyncio.to_thread(cluster.wait_for, partial(has_decode_workers, cluster, 1), PATIENCE_S)
    words = cluster.log.read_text()
    assert "decision=grow" in words and "decision=shrink" in words and " is gone" in words
    print(f"{len(seen.answers)} answers, {sum(bool(answer.num_retries) for _, answer in seen.answers)} of them handed over")
    status, output = await order(cluster, "autoscale", "--json")
    assert status == 0 and json.loads(output)["workers"] == 1, output


async def test_bad_bounds_are_refused_before_anything_starts(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from shoal.cli.main import cli

    for flags, words in (
        (["--autoscale-decode", "4-1"], "1 ≤ MIN ≤ MAX, not 4 and 1"),
        (["--autoscale-decode", "1"], "should be MIN-MAX workers, as in 1-4"),
        (["--autoscale-dry-run"], "no pool scales"),
        (
            ["--autoscale-nodes", "kuberay", "--autoscale-decode", "1-2"],
            "needs the RayCluster's name: raycluster in the mapping autoscale",
        ),
        (["--autoscale-nodes", "ray", "--autoscale-decode", "1-2"], "needs --ray-address and --pool-labels"),
    ):
        result = CliRunner().invoke(cli, ["serve", *flags])
        assert result.exit_code == 2 and words in result.output, (flags, result.output)
