"""One run: a model, a cluster, callers and strikes together, and the verdict when all is quiet again."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2
from tests.chaos.cluster import Victims, running
from tests.chaos.driver import Driver
from tests.chaos.killer import Hit, Killer
from tests.chaos.outcome import Outcome
from tests.chaos.plan import Deed, Mix, Plan, make_plan, strikes
from tests.chaos.reference import Reference
from tests.chaos.verdict import Verdict, judge
from tests.e2e.conftest import Cluster

IDLE_WITHIN_S = 30.0  # after the last request, every block, reservation and transfer must be back
FOUR_LAYERS = ("full", "speed:2", "speed:3:anchors=4", "speed:1:anchors=0", "pop:2", "pop:1:late", "pop:3:late")
_SMOLLM2 = ("full", "speed:22", "pop:20", "pop:20:late")

# Every n-th passing of a point: slow packing, sends and receives, damaged bytes, and messages that fail to be made.
FAULTS: Mapping[str, Mapping[str, object]] = {
    "before-pack": {"action": "delay", "delay_s": 0.08, "every": 11, "times": None},
    "before-send": {"action": "corrupt", "skip": 40, "every": 251, "times": None},
    "mid-send": {"action": "delay", "delay_s": 0.1, "every": 17, "times": None},
    "before-post": {"action": "delay", "delay_s": 0.1, "every": 13, "times": None},
    "after-unpack": {"action": "delay", "delay_s": 0.1, "every": 19, "times": None},
    "before-open": {"action": "raise", "skip": 60, "every": 499, "times": None},
    "before-accept": {"action": "delay", "delay_s": 0.3, "every": 11, "times": None},
    "before-ack": {"action": "delay", "delay_s": 0.3, "every": 23, "times": None},
    "layer-1": {"action": "delay", "delay_s": 0.1, "every": 9, "times": None},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run is told."""

    model: str  # "random", or what `shoal serve --model` takes
    num_requests: int
    seed: int
    rate: float = 0.0  # requests a second; 0: what suits the model
    max_strikes: int | None = None  # None: as many as there is time for
    own_ray: bool = True  # a Ray that outlives the controller, which may then be killed too
    deeds: frozenset[Deed] = frozenset(Deed)
    faults: bool = True
    transfer_backend: str = "auto"
    minutes: float = 12.0  # no request is sent later


@dataclass(slots=True)
class Result:
    """All that one run showed."""

    setting: Setting
    plan: Plan
    verdict: Verdict
    hits: list[Hit]
    num_asked: int
    seconds: float
    reference_s: float
    idle_after_s: float | None  # None: something was still held
    held: dict[str, str] = field(default_factory=dict)  # by worker, what was


@dataclass(frozen=True, slots=True)
class News:
    """Where a run tells how it goes."""

    ended: Callable[[Outcome], None]
    struck: Callable[[Hit], None]


def mix_of(setting: Setting, vocab_size: int) -> Mix:
    """Short requests that suit the model."""
    if setting.model == "random":
        return Mix(vocab_size, FOUR_LAYERS, (1, 200), (1, 48), max(1, setting.num_requests // 8), setting.rate or 10.0, 48, 2.0)
    return Mix(vocab_size, _SMOLLM2, (2, 48), (1, 12), max(1, setting.num_requests // 5), setting.rate or 1.5, 16, 5.0)


def run(setting: Setting, folder: Path, news: News) -> Result:
    """Raises when the cluster cannot be started; whatever happens to it later is in the result."""
    is_random = setting.model == "random"
    model = str(write_random_model(folder / "model", max_context=1024)) if is_random else setting.model
    mix = mix_of(setting, 512 if is_random else 49_152)
    plan = make_plan(mix, setting.num_requests, setting.seed)
    began = time.monotonic()
    reference = Reference(model)
    reference.answer_all(plan.questions)
    reference_s = time.monotonic() - began
    arguments = ["--model", model, "--visibilities", ",".join(mix.visibilities)]
    arguments += ["--kv-memory", "4MiB" if is_random else "256MiB", "--transfer-backend", setting.transfer_backend]
    with running(arguments, folder, own=setting.own_ray, faults=dict(FAULTS) if setting.faults else {}) as cluster:
        result = asyncio.run(_drive(setting, plan, mix.max_open, cluster, news, reference))
    result.reference_s = reference_s
    return result


async def _drive(setting: Setting, plan: Plan, max_open: int, cluster: Cluster, news: News, reference: Reference) -> Result:
    victims = Victims(cluster)
    driver = Driver(victims.address, plan, f"chaos-{setting.seed}", max_open)
    deeds = setting.deeds if setting.own_ray else setting.deeds - {Deed.CONTROLLER, Deed.ORPHAN}
    killer = Killer(victims, strikes(setting.seed, deeds))
    began, stop, out_of_time = time.monotonic(), asyncio.Event(), asyncio.Event()
    killing = asyncio.create_task(killer.run(stop, news.struck, setting.max_strikes))
    killing.add_done_callback(lambda task: out_of_time.set() if task.cancelled() or task.exception() else None)
    timer = asyncio.get_running_loop().call_later(60 * setting.minutes, out_of_time.set)
    try:
        await driver.run(news.ended, out_of_time)
    finally:
        timer.cancel()
        stop.set()
    await killing
    idle_after_s, held = await until_idle(victims)
    seconds = time.monotonic() - began
    verdict = judge(driver.outcomes, plan.questions, reference.answers, reference.explains, killer.hits)
    if held:
        verdict.add("held", None, "; ".join(f"{name}: {what}" for name, what in held.items()))
    if len(driver.outcomes) < len(plan.asks):
        verdict.add(
            "time", None, f"{len(plan.asks) - len(driver.outcomes)} requests were not sent within {setting.minutes:g} min"
        )
    with contextlib.suppress(grpc.aio.AioRpcError):
        if changed := await killer.innocents():
            verdict.add("restart", None, f"restarted without having been struck: {', '.join(changed)}")
    await driver.close()
    await victims.close()
    return Result(setting, plan, verdict, killer.hits, len(driver.outcomes), seconds, 0.0, idle_after_s, held)


async def until_idle(victims: Victims) -> tuple[float | None, dict[str, str]]:
    """Seconds until nothing was held anywhere, and what was held when that took too long."""
    began = time.monotonic()
    held = {"the router": "no answer"}
    while time.monotonic() - began < IDLE_WITHIN_S:
        with contextlib.suppress(grpc.aio.AioRpcError):
            loads = await victims.loads()
            held = {name: what for name, load in loads.items() if (what := _held(load))}
            if len(loads) < 4:
                held["the router"] = f"{len(loads)} workers answer"
            elif num_active := await victims.num_active():
                held["the router"] = f"{num_active} requests"
            if not held:
                return time.monotonic() - began, {}
        await asyncio.sleep(0.1)
    return None, held


_MUST_BE_ZERO = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_blocks",
    "num_reservations",
    "num_transfers_in_flight",
    "outstanding_token_layers",
    "num_staging_in_use",
    "num_staging_quarantined",
)


def _held(load: shoal_pb2.WorkerLoad) -> str:
    return ", ".join(f"{name} {getattr(load, name)}" for name in _MUST_BE_ZERO if getattr(load, name))
