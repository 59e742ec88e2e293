"""Simulated clusters: exact where theory is exact, reproducible, monotone, and driven by placement's own code."""

import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.placement import balance
from shoal.placement.batching import Batcher
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.cluster import decode_node, front_door
from shoal.simulator.cluster.events import EventLoop
from shoal.simulator.cluster.network import Flow, Network, Port
from shoal.simulator.cluster.outcome import Outcome
from shoal.simulator.cluster.shipment import Shipments
from shoal.simulator.cluster.simulate import simulate
from shoal.simulator.cluster.spec import ClusterSpec, Failure, FailureSpec, PoolSpec, Slo, num_kv_blocks
from shoal.simulator.machine import Machine
from shoal.simulator.profiles import PROFILES
from shoal.simulator.request_cost import colocated_ttft_s, request_alone
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire, handoff_bytes
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest
from shoal.visibility import Visibility

NAMES = Catalogues.shipped()
LLAMA, GEMMA = NAMES.model("llama-3.1-8b"), NAMES.model("gemma-3-12b")
MACHINE = Machine(NAMES.gpu("h100"), PROFILES["kernels-h100"])
SLOWER = Machine(NAMES.gpu("a100"), PROFILES["kernels-a100"])
KINDS = ["full", "full:boundary=9", "speed:24", "speed:24:anchors=4:boundary=5", "pop:22", "pop:22:late"]


def cluster(text: str = "full", *, prefill: int = 1, decode: int = 1, link: str = "100gbe", **changes: object) -> ClusterSpec:
    model = changes.pop("model", LLAMA)
    pool = {name: changes.pop(name) for name in ("token_budget", "max_running", "max_queued") if name in changes}
    assert model is LLAMA or model is GEMMA
    spec = ClusterSpec(
        model=LLAMA if model is LLAMA else GEMMA,
        visibility=Visibility.parse(text).resolve(LLAMA.shape.num_layers if model is LLAMA else GEMMA.shape.num_layers),
        decode=(PoolSpec(MACHINE, decode, **pool),),  # type: ignore[arg-type]
        prefill=(PoolSpec(MACHINE, prefill, **pool),) if prefill else (),  # type: ignore[arg-type]
        link=NAMES.link(link),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def load(rate: float = 10.0, count: int = 120, seed: int = 3, prompt: int = 2000, output: int = 60) -> Iterator[SimRequest]:
    return drawn(Arrivals(rate), Lengths(prompt, 1.0, 20_000), Lengths(output, 1.0, 2_000), count, seed)


@pytest.mark.parametrize("model", [LLAMA, GEMMA])
@pytest.mark.parametrize("text", KINDS)
def test_one_request_alone_takes_what_the_formulas_say(text: str, model: object) -> None:
    spec = cluster(text, model=model)
    outcome = simulate(spec, iter([SimRequest(0.0, 1500, 5)]))
    assert spec.link is not None
    alone = request_alone(spec.model, spec.visibility, 1500, MACHINE, MACHINE, Wire.of(spec.link, MACHINE))
    assert outcome.wire_bytes == pytest.approx(alone.handoff.num_bytes, rel=1e-12)
    assert outcome.exposed_s.p50 == pytest.approx(alone.handoff.exposed_s, rel=0.02)
    assert outcome.ttft_s.p50 == pytest.approx(alone.ttft_s, rel=0.01)
    assert outcome.tpot_s.p50 == pytest.approx(alone.tpot_s, rel=0.005)


@pytest.mark.parametrize("text", KINDS)
@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_chunks_ship_what_placement_counts(text: str, model: object) -> None:
    spec = cluster(text, model=model)
    shipments = Shipments(StepCost(spec.model, MACHINE, spec.visibility))
    for num_tokens in (1, 2, 10, 5000):
        split = spec.visibility.split(num_tokens)
        cuts = sorted({0, split.num_prefill_tokens // 3, split.num_prefill_tokens // 2, split.num_prefill_tokens})
        parts = [shipments.chunk(split, start, stop) for start, stop in pairwise(cuts)]
        total = sum(part.early_bytes + part.last_bytes for part in parts)
        assert total == handoff_bytes(spec.model, spec.visibility, num_tokens).total


@pytest.mark.parametrize("text", ["full", "speed:24", "pop:22:late"])
def test_every_byte_and_token_is_accounted(text: str) -> None:
    spec, requests = cluster(text, prefill=2, decode=2), list(load())
    outcome = simulate(spec, iter(requests))
    assert outcome.num_finished == len(requests) and not outcome.num_refused
    expected = sum(handoff_bytes(LLAMA, spec.visibility, r.num_prompt_tokens).total for r in requests)
    assert outcome.wire_bytes == pytest.approx(expected, rel=1e-12)
    tokens = sum(r.num_output_tokens for r in requests)
    assert outcome.output_tokens_per_s * outcome.duration_s == pytest.approx(tokens)


def test_reruns_are_identical_and_seeds_matter() -> None:
    spec, lines = cluster(prefill=3, decode=3), [io.StringIO(), io.StringIO()]
    first, second = (simulate(spec, load(), seed=5, lines=out) for out in lines)
    assert asdict(first) == asdict(second) and lines[0].getvalue() == lines[1].getvalue()
    assert lines[0].getvalue().count("\n") == 121
    assert asdict(simulate(spec, load(), seed=6)) != asdict(first)


@pytest.mark.parametrize("text", ["full", "speed:24"])
@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_many_steps_in_one_event_are_the_same_as_one_by_one(monkeypatch: pytest.MonkeyPatch, text: str, model: object) -> None:
    spec = cluster(text, model=model)
    fast = simulate(spec, load(rate=20, count=40, output=250))
    monkeypatch.setattr(decode_node, "_LONGEST_BURST", 1)
    slow = simulate(spec, load(rate=20, count=40, output=250))
    assert slow.num_events > 2 * fast.num_events
    tolerance = 1e-9 if model is LLAMA else 1e-3  # windows that fill up within a burst are taken as a straight line
    for name in ("ttft_s", "tpot_s"):
        for share in (0.5, 0.95):
            assert getattr(fast, name).at(share) == pytest.approx(getattr(slow, name).at(share), rel=tolerance)
    assert fast.itl_s.p50 == pytest.approx(slow.itl_s.p50, rel=0.02)


def served(outcome: Outcome) -> float:
    assert outcome.ttft_s.mean is not None and outcome.exposed_s.mean is not None
    return outcome.exposed_s.mean


@settings(max_examples=12, deadline=None, derandomize=True)
@given(text=st.sampled_from(["full", "speed:20", "pop:22"]), rate=st.floats(2, 20), seed=st.integers(0, 99))
def test_more_bandwidth_never_hurts(text: str, rate: float, seed: int) -> None:
    exposed = [served(simulate(cluster(text, link=link), load(rate, 40, seed))) for link in ("10gbe", "25gbe", "100gbe")]
    assert exposed[0] >= exposed[1] >= exposed[2]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rate=st.floats(5, 60), seed=st.integers(0, 99), colocated=st.booleans())
def test_more_workers_never_lower_goodput(rate: float, seed: int, colocated: bool) -> None:
    slo = Slo(0.3, 0.02)
    shares = []
    for workers in (1, 2, 4):
        spec = cluster(prefill=0 if colocated else workers, decode=workers, slo=slo)
        shares.append(simulate(spec, load(rate, 60, seed)).slo_attainment)
    assert shares[0] <= shares[1] + 0.02 and shares[1] <= shares[2] + 0.02  # a tie at random may cost one request of sixty


def test_contention_shares_a_link_fairly() -> None:
    network, loop = Network(), EventLoop()
    ports = [Port(name, 100.0) for name in ("a", "b", "c")]
    done: dict[str, float] = {}

    def flow(name: str, source: Port, sink: Port) -> Flow:
        def finished(now: float) -> list[tuple[float, object]]:
            done[name] = now
            return []

        return Flow(source, sink, finished)  # type: ignore[arg-type]

    both = [flow("one", ports[0], ports[2]), flow("two", ports[1], ports[2])]
    for each, num_bytes in zip(both, (100.0, 300.0), strict=True):
        loop.add(network.send(each, num_bytes, 0.0))
        loop.add(network.close(each, 0.0))
    loop.run()
    assert done["one"] == pytest.approx(2.0) and done["two"] == pytest.approx(4.0)  # 50 B/s each, then 100 for the longer one
    assert ports[2].sent_bytes == pytest.approx(400)


def test_a_shared_fabric_limits_all_flows_together() -> None:
    free = simulate(cluster(prefill=4, decode=4), load(rate=100))
    tight = simulate(cluster(prefill=4, decode=4, fabric_bytes_per_s=1.25e9), load(rate=100))
    assert served(tight) > 5 * served(free)


def test_memory_is_reserved_during_the_transfer_and_holds_others_back() -> None:
    slow = simulate(cluster(link="1Gb/s", reserve_tokens=4000, max_running=4), load(rate=50, count=40))
    fast = simulate(cluster(link="100gbe", reserve_tokens=4000, max_running=4), load(rate=50, count=40))
    assert slow.queueing_s.p95 is not None and fast.queueing_s.p95 is not None
    assert slow.queueing_s.p95 > 2 * fast.queueing_s.p95


def test_full_workers_refuse_and_other_workers_are_tried() -> None:
    outcome = simulate(cluster(max_running=2, max_queued=1), load(rate=200, count=60))
    assert outcome.refused["no room"] > 20 and outcome.num_finished + outcome.num_refused == 60
    two = simulate(cluster(prefill=1, decode=2, max_running=2, max_queued=1), load(rate=200, count=60))
    assert two.num_retries > outcome.num_retries // 2 and two.num_finished > outcome.num_finished


def test_requests_that_can_never_fit_are_refused_with_their_reason() -> None:
    requests = [SimRequest(0.0, 131_000, 100), SimRequest(0.1, 10, 5)]
    outcome = simulate(cluster(), iter(requests))
    assert outcome.refused == {"longer than the model's context": 1} and outcome.num_finished == 1
    small = replace(MACHINE, profile=MACHINE.profile.changed(memory=0.21))  # 0.8 GB beside the weights
    spec = replace(cluster(prefill=0), decode=(PoolSpec(small, 1),))
    outcome = simulate(spec, iter([SimRequest(0.0, 20_000, 100)]))
    assert outcome.refused == {"larger than a worker's whole KV pool": 1}


def test_a_slower_worker_gets_less_and_chunking_bounds_a_step() -> None:
    lines = io.StringIO()
    spec = replace(cluster(), prefill=(PoolSpec(MACHINE, 1), PoolSpec(SLOWER, 1)))
    simulate(spec, load(rate=30, count=200), lines=lines)
    text = lines.getvalue()
    assert text.count("prefill-0-0") > 1.3 * text.count("prefill-1-0") > 20
    colocated = [simulate(cluster(prefill=0, token_budget=budget), load(rate=8, count=80, prompt=8000)) for budget in (256, 8192)]
    assert colocated[0].itl_s.p99 is not None and colocated[1].itl_s.p99 is not None
    assert colocated[0].itl_s.p99 < colocated[1].itl_s.p99


def test_prefix_cache_saves_prefill_and_ships_all_the_same() -> None:
    hashes = tuple(range(8))
    requests = [SimRequest(float(second), 4097, 5, hashes) for second in range(10)]
    plain = simulate(cluster(), iter(requests))
    cached = simulate(cluster(prefill_cache=True), iter(requests))
    assert cached.cached_share == pytest.approx(0.9 * 4095 / 4097, rel=1e-3) and plain.cached_share == 0
    assert cached.wire_bytes == plain.wire_bytes
    assert cached.ttft_s.p50 is not None and plain.ttft_s.p50 is not None and cached.ttft_s.p50 < plain.ttft_s.p50


@pytest.mark.parametrize("text", KINDS)
@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_a_prefix_on_the_decode_side_is_not_shipped_again(text: str, model: object) -> None:
    shared, own = tuple(range(6)), (91, 92)
    requests = [
        SimRequest(0.0, 4096, 5, (*shared, *own)),
        SimRequest(9.0, 4096, 5, (*shared, 93, 94)),
        SimRequest(18.0, 4096, 5, (*shared, *own)),
    ]
    spec = cluster(text, model=model, decode_cache=True)
    lines = io.StringIO()
    outcome = simulate(spec, iter(requests), lines=lines)
    rows = [row.split(",") for row in lines.getvalue().splitlines()[1:]]
    held = [int(row[4]) for row in rows]
    num_prefill = spec.visibility.split(4096).num_prefill_tokens
    has_windows = bool(spec.model.shape.windows)
    assert held[0] == 0
    if text.startswith("pop") and has_windows:
        assert (
            held[2] == 0
        )  # pop keeps whole blocks of prefill tokens, and at their end a window layer no longer has all it needs
    else:
        assert held[2] in (num_prefill, num_prefill // 16 * 16)
    assert held[1] == (0 if has_windows else 6 * 512)  # a window layer holds its last tokens only: not those before the fork
    shipped = [int(row[-2]) for row in rows]
    assert shipped == [round(handoff_bytes(spec.model, spec.visibility, 4096, num_cached=c).total) for c in held]
    if held[2] == num_prefill:
        assert rows[2][6] == "" and shipped[2] == 0  # prefill was not called
    assert outcome.num_finished == 3


def test_caches_give_way_to_requests_and_die_with_their_worker() -> None:
    requests = [SimRequest(0.4 * index, 4096, 5, tuple(range(8 * (index % 40), 8 * (index % 40) + 8))) for index in range(120)]
    small = replace(MACHINE, profile=MACHINE.profile.changed(memory=0.35))
    pools = {"prefill": (PoolSpec(small, 1),), "decode": (PoolSpec(small, 1),)}
    roomy = simulate(cluster(decode_cache=True, prefill_cache=True), iter(requests))
    tight = simulate(replace(cluster(decode_cache=True, prefill_cache=True), **pools), iter(requests))  # type: ignore[arg-type]
    assert roomy.cached_share > 0.6 > tight.cached_share and tight.num_finished == 120
    deaths = FailureSpec((Failure(20.0, "decode-0-0"), Failure(20.0, "prefill-0-0")), restart_s=0.1)
    bereft = simulate(cluster(decode_cache=True, prefill_cache=True, failures=deaths), iter(requests))
    assert bereft.cached_share < roomy.cached_share


def test_shallow_prefill_workers_have_more_room_for_kv() -> None:
    full, speed = (Visibility.parse(text).resolve(32) for text in ("full", "speed:16"))
    blocks = [num_kv_blocks(LLAMA, shown, MACHINE, 16, prefill_only=True) for shown in (full, speed)]
    assert blocks[1] > blocks[0]
    assert num_kv_blocks(LLAMA, speed, MACHINE, 16, prefill_only=False) < blocks[0]  # the LM head is there too


def test_a_mutated_placement_rule_changes_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = cluster(prefill=2, decode=2)
    honest = simulate(spec, load(rate=40))
    assert front_door.choose_pair is balance.choose_pair
    with monkeypatch.context() as patched:
        patched.setattr(balance, "_least_loaded", lambda candidates, rng: candidates[0])
        assert asdict(simulate(spec, load(rate=40))) != asdict(honest)
    with monkeypatch.context() as patched:
        cut = Batcher._cut_chunks
        patched.setattr(Batcher, "_cut_chunks", lambda self, waiting, *rest: cut(self, waiting[::-1], *rest)[::-1])
        assert asdict(simulate(spec, load(rate=40))) != asdict(honest)
    assert asdict(simulate(spec, load(rate=40))) == asdict(honest)


@pytest.mark.parametrize("text", ["full", "full:boundary=9", "speed:24", "speed:24:anchors=4:boundary=5", "pop:22"])
@pytest.mark.parametrize("num_tokens", [700, 2048, 5000])
def test_a_prompt_alone_on_a_colocated_worker_takes_what_the_bound_says(text: str, num_tokens: int) -> None:
    spec = cluster(text, prefill=0)
    outcome = simulate(spec, iter([SimRequest(0.0, num_tokens, 2)]))
    alone = colocated_ttft_s(StepCost(LLAMA, MACHINE, spec.visibility), num_tokens, 2048)
    assert outcome.ttft_s.p50 == pytest.approx(alone, rel=1e-3)
