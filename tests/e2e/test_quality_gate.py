"""The quality gate over real workers: what replays measure, the fall back to full depth, and that clients feel none of it."""

import asyncio
import json
import logging
import random
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shoal.config.shadow import ShadowConfig
from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2
from shoal.placement.quality_band import Comparison
from shoal.router import instruments
from tests.e2e.served import Served, ask, served
from tests.fakes.workers import until
from tests.oracle.mask_oracle import Case, MaskOracle

VOCAB = 512
BAND = ShadowConfig(rate=1.0, min_agreement=0.9, window=8, min_samples=3, cool_down_s=0.0)
QUICK = {"load_interval_s": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but attention in the upper half adds nothing: what prompt tokens leave there is of no consequence."""
    folder = write_random_model(tmp_path_factory.mktemp("harmless"))
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    for layer in (2, 3):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
    save_file(weights, file)
    return folder


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


async def replayed(cluster: Served) -> None:
    """Wait until nothing is held."""
    await until(lambda: not instruments.SHADOW_HELD._value.get(), timeout_s=20)


async def quality(cluster: Served, visibility: str) -> shoal_pb2.VisibilityQuality:
    info = await cluster.stub.GetServerInfo(shoal_pb2.GetServerInfoRequest())
    return next(found for found in info.quality if found.visibility == visibility)


async def test_a_random_models_shallow_answers_leave_the_band_and_full_depth_steps_in(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng, samples, answers = random.Random(5), [], []
    caplog.set_level(logging.DEBUG)
    oracle = MaskOracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager"))
    async with served(model, router={"shadow": BAND, "http_listen": "127.0.0.1:0"} | QUICK) as cluster:
        gates = cluster.router.service.parts.gates
        take, gates.take = gates.take, lambda policy, sample: (samples.append(sample), take(policy, sample))  # type: ignore[method-assign,func-returns-value,assignment]
        prompts = [ids(rng, 40) for _ in range(4)]
        for number, prompt in enumerate(prompts[:3]):
            [done] = await cluster.completes(ask(prompt, "speed:2", max_tokens=9, temperature=float(number), stream=True))
            assert (done.visibility, done.requested_visibility, done.notices) == ("speed:2:boundary=1", "", [])
            answers.append(list(done.output_ids))
            await replayed(cluster)
        found = await quality(cluster, "speed:2")
        assert (found.state, found.reason, found.num_samples) == ("full", "agreement", 0)  # the window began anew
        assert instruments.QUALITY_STATE.labels("speed:2")._value.get() == 1

        [replaced] = await cluster.completes(ask(prompts[3], "speed:2:boundary=3", max_tokens=9))
        [deep] = await cluster.completes(ask(prompts[3], "full", max_tokens=9))
        assert list(replaced.output_ids) == list(deep.output_ids) and not deep.notices
        assert (replaced.visibility, replaced.requested_visibility) == ("full:boundary=3", "speed:2:boundary=3")
        assert replaced.visibility_reason == "agreement" and "visibility speed:2 was replaced by full" in replaced.notices[0]
        await replayed(cluster)
        found = await quality(cluster, "speed:2")
        assert (found.num_samples, found.num_replaced_requests) == (1, 1) and found.agreement < 0.9  # it goes on being measured

        other = await cluster.completes(ask(prompts[3], "pop:2", max_tokens=2))
        score = await cluster.stub.Score(shoal_pb2.ScoreRequest(text="a b", continuation_text="c", visibility="speed:2"))
        assert (other[0].visibility, score.visibility) == ("pop:2:boundary=1", "speed:2:boundary=1")  # neither is replaced
        body = {"prompt": prompts[3], "visibility": "speed:2", "max_tokens": 2}
        async with httpx2.AsyncClient() as http:
            said = (await http.post(f"http://{cluster.router.http_address}/v1/completions", json=body)).json()["shoal"]
        assert (said["visibility"], said["visibility_reason"]) == ("full:boundary=1", "agreement")
        assert said["requested_visibility"] == "speed:2:boundary=1" and len(said["notices"]) == 1
        await replayed(cluster)

        for _ in range(BAND.min_samples):
            take("speed:2", Comparison(1000, 1000, 0.0))  # of the window of eight, most of the tokens
        [again] = await cluster.completes(ask(prompts[3], "speed:2", max_tokens=2))
        assert (again.visibility, again.requested_visibility) == ("speed:2:boundary=1", "")
        await replayed(cluster)

    for prompt, answer, sample in zip(prompts, answers, samples, strict=False):
        cases = (Case("full"), Case("speed", 2, 1))
        deep_rows, rows = (oracle.scores(prompt + answer, len(prompt), case)[-len(answer) - 1 : -1] for case in cases)
        agreeing = (deep_rows.argmax(-1) == rows.argmax(-1)).sum().item()
        exact = (deep_rows.exp() * (deep_rows - rows)).sum().item()
        assert (sample.num_tokens, sample.num_agreeing) == (len(answer), agreeing)
        assert 0.3 * exact < sample.kl_nats <= exact + 1e-2
    lines = [record for record in caplog.records if "quality gate" in record.message]
    assert [record.levelname for record in lines] == ["ERROR", "WARNING"]
    records = [record.__dict__ for record in caplog.records if record.name.startswith("shoal.router")]
    told = json.dumps(records, default=str)
    assert str(prompts[0][:3])[1:-1] not in told and str(answers[0][:3])[1:-1] not in told


async def test_where_prompts_matter_only_below_the_answers_agree_and_nothing_is_replaced(harmless: Path) -> None:
    rng = random.Random(2)
    async with served(harmless, router={"shadow": BAND} | QUICK) as cluster:
        for _ in range(2 * BAND.min_samples):
            await cluster.completes(ask(ids(rng, 40), "speed:2", max_tokens=20, temperature=1.0))
            await cluster.completes(ask(ids(rng, 40), "pop:2", max_tokens=20))
            await replayed(cluster)
        for visibility in ("speed:2", "pop:2"):
            found = await quality(cluster, visibility)
            assert (found.state, found.agreement, found.num_replaced_requests) == ("served", 1.0, 0)
            assert found.num_samples == 2 * BAND.min_samples and found.num_tokens == 20 * found.num_samples
            assert found.kl_nats == pytest.approx(0.0, abs=1e-4)


async def test_clients_get_the_same_with_replays_as_without(model: Path) -> None:
    """Tokens, bytes that crossed, cached tokens; and the prefix caches hold the same."""
    seen = []
    for shadow in (ShadowConfig(), ShadowConfig(rate=1.0)):
        rng, told = random.Random(7), []
        async with served(model, router={"shadow": shadow} | QUICK) as cluster:
            for prompt in [ids(rng, 70) for _ in range(3)] * 2:
                for visibility in ("full", "speed:2", "pop:1:late"):
                    [done] = await cluster.completes(ask(prompt, visibility, max_tokens=8, seed=1, temperature=1.0))
                    transfer = done.transfer
                    assert transfer.payload_bytes == transfer.plan_bytes
                    told.append((list(done.output_ids), transfer.payload_bytes, done.cached_tokens, done.prefill_cached_tokens))
                    await replayed(cluster)
            await cluster.all_free()
            kept = [worker.load().num_cached_blocks for worker in (*cluster.decode, *cluster.prefill)]
        seen.append((told, kept))
    assert seen[0] == seen[1] and any(cached for _, _, cached, _ in seen[0][0])


async def test_one_pool_that_prefills_for_itself_replays_too(model: Path) -> None:
    measured = instruments.SHADOWED.labels("pop:2", "measured")
    before = measured._value.get()
    async with served(model, 0, 1, router={"shadow": ShadowConfig(rate=1.0)} | QUICK, decode=[{"colocated": True}]) as cluster:
        [done] = await cluster.completes(ask(ids(random.Random(3), 30), "pop:2"))
        await replayed(cluster)
    assert done.transfer.prefill_at == "decode_worker" and measured._value.get() == before + 1


@pytest.mark.parametrize("ends", ["router", "decode worker"])
async def test_a_replay_in_flight_is_freed_when_either_end_goes(model: Path, ends: str) -> None:
    """Every worker is idle at the end, or `served` fails."""
    rng = random.Random(1)
    failed = instruments.SHADOWED.labels("speed:2", "failed")
    before = failed._value.get()
    async with served(model, 1, 2, router={"shadow": ShadowConfig(rate=1.0)} | QUICK, token_budget=2) as cluster:
        await cluster.completes(ask(ids(rng, 100), "speed:2", max_tokens=200))
        busy = await cluster.busy_worker()
        assert instruments.SHADOW_HELD._value.get() == 1
        if ends == "router":
            await cluster.router.stop()
        else:
            await cluster.stop(busy)
            await until(lambda: failed._value.get() == before + 1, timeout_s=20)
            [done] = await asyncio.wait_for(cluster.completes(ask(ids(rng, 10), "speed:2", max_tokens=2)), 20)
            assert done.completion_tokens == 2
            await replayed(cluster)
    assert instruments.SHADOW_HELD._value.get() == 0
