"""A deployment of one prefill and one decode worker as the simulator sees it, and a trace on both."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.simulator.calibration.fit import Fit
from shoal.simulator.calibration.replay import LiveRun, Verdict, verdicts
from shoal.simulator.cluster.outcome import Outcome
from shoal.simulator.cluster.simulate import simulate
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.workload.requests import SimRequest
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Setup:
    """How the workers were started, as far as a simulation needs it."""

    model: ModelSpec
    visibility: Visibility  # resolved
    token_budget: int
    max_running: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Live and simulated, of the same requests."""

    requests: tuple[SimRequest, ...]
    runs: tuple[LiveRun, ...]
    simulated: Outcome
    verdicts: tuple[Verdict, ...]


def deployment(setup: Setup, fitted: Fit) -> ClusterSpec:
    """One prefill and one decode worker of the fitted machine."""
    pool = PoolSpec(fitted.machine, 1, setup.token_budget, setup.max_running)
    return ClusterSpec(setup.model, setup.visibility, (pool,), (pool,), fitted.link, block_size=setup.block_size)


def compare(setup: Setup, fitted: Fit, requests: Sequence[SimRequest], runs: Sequence[LiveRun], seed: int = 0) -> Comparison:
    """Simulate what was replayed. Raises InvalidConfig when the simulated workers had to refuse what the live ones served."""
    outcome = simulate(deployment(setup, fitted), iter(requests), seed=seed)
    if outcome.num_refused:
        raise InvalidConfig(f"{outcome.num_refused} requests were refused in simulation and served live: {outcome.refused}")
    return Comparison(tuple(requests), tuple(runs), outcome, tuple(verdicts(runs, outcome)))
