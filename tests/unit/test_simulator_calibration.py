"""Calibration: a fit finds the constants that made the points, says what it cannot find; its file feeds planning."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.main import cli
from shoal.client import Chunk, Completion
from shoal.client.types import Timings, Transfer
from shoal.errors import InvalidConfig
from shoal.placement.cost import kv_layer_tokens_read
from shoal.simulator.calibration.fit import Fit, fit, notes_on_noise
from shoal.simulator.calibration.least_squares import non_negative
from shoal.simulator.calibration.measure import Programme, measure
from shoal.simulator.calibration.points import CrowdPoint, DecodePoint, Measured, PrefillPoint, Sample, residuals
from shoal.simulator.calibration.profile_file import read_profile, write_profile
from shoal.simulator.calibration.scatter import residual_svg
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.hardware import Gpu, Link
from shoal.simulator.machine import Machine
from shoal.simulator.profiles import Profile
from shoal.simulator.request_cost import first_step_s
from shoal.simulator.step_cost import StepCost, StepWork
from shoal.simulator.transfer_cost import Wire, handoff_bytes, handoff_cost
from shoal.visibility import Visibility

NAMES = Catalogues.shipped()
MODEL = NAMES.model("smollm2-135m")
TRUTH = Profile("truth", "made up", 0.5, 0.3, 0.6, 0.4, 1.0, 50.0, 0.0, 0.002, 0.0007, 0.012, 0.003, 0.0, memory=1.0)
HOST = Gpu("host", 1e12, 4e9, 40e9, 1e9, 1e9, None, "made up")
LINK = Link("loopback", 2e9, 0.0, "made up")
SHOWN = tuple(Visibility.parse(text).resolve(30) for text in ("full", "speed:22", "pop:20"))


def points(truth: Profile = TRUTH, lengths: tuple[int, ...] = (64, 256, 700, 2048), noise: float = 0.0) -> Measured:
    machine, wire, rng = Machine(HOST, truth), Wire.of(LINK, Machine(HOST, truth)), np.random.default_rng(1)

    def sample(seconds: float) -> Sample:
        return Sample(tuple(seconds * (1 + noise * float(rng.normal())) for _ in range(3)))

    prefill, decode = [], []
    for shown in SHOWN:
        cost = StepCost(MODEL, machine, shown)
        for length in lengths:
            seconds = cost.prefill_s(shown.split(length).num_prefill_tokens, chunk_tokens=512)
            exposed = handoff_cost(cost, wire, length, chunk_tokens=512).exposed_s
            other, num_bytes = first_step_s(cost, length) + truth.request_s, handoff_bytes(MODEL, shown, length).total
            prefill.append(PrefillPoint(shown, length, sample(seconds), sample(exposed), sample(other), round(num_bytes)))
    cost = StepCost(MODEL, machine, SHOWN[0])
    for context in (128, 1024):
        for batch in (1, 4, 8):
            read = batch * kv_layer_tokens_read(MODEL.shape, SHOWN[0], context, 20)
            step = cost.step_s(StepWork(num_rows=batch, num_kv_layer_tokens=read))
            decode.append(DecodePoint(SHOWN[0], batch, context, read, sample(step)))
    return Measured(MODEL, tuple(prefill), tuple(decode), 512)


def fitted(measured: Measured, **given: Any) -> Fit:
    return fit(measured, **({"name": "mine", "source": "test", "gpu": HOST, "link": LINK, "memory_bytes": 4e9} | given))


def test_a_fit_finds_the_constants_that_made_the_points() -> None:
    found = fitted(points()).profile
    for name in ("gemm", "attention", "kv_read", "num_half_tokens", "row_s", "handoff_s", "request_s", "step_s", "weight_read"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.02), name
    assert found.link == pytest.approx(1.0, rel=0.05)
    rows = residuals(points(), Machine(HOST, found), Wire.of(LINK, Machine(HOST, found)))
    assert len(rows) == 2 * 12 + 6 and max(abs(row.error) for row in rows) < 0.01


def test_noise_moves_the_constants_little_and_is_warned_of() -> None:
    measured = points(noise=0.04)
    found = fitted(measured).profile
    assert found.gemm == pytest.approx(TRUTH.gemm, rel=0.1) and found.kv_read == pytest.approx(TRUTH.kv_read, rel=0.3)
    spreads = [(f"{p.num_prompt_tokens}", p.prefill.spread) for p in measured.prefill]
    assert notes_on_noise(spreads, 0.0) and not notes_on_noise(spreads, 1.0)
    assert not notes_on_noise([("measured once", None)], 0.0)
    assert notes_on_noise([("a", 0.2), ("b", 0.5), ("c", 0.1)], 0.15) == ["b: repeats differ by 50%", "a: repeats differ by 20%"]


def test_without_hardware_the_fitted_rates_become_the_nominal_ones() -> None:
    found = fitted(points(), gpu=None, link=None)
    assert found.profile.gemm == 1.0 and found.gpu.flops == pytest.approx(0.5e12, rel=0.02)
    assert found.profile.weight_read == 1.0 and found.profile.kv_read == pytest.approx(0.4 / 0.6, rel=0.05)
    assert found.link.bytes_per_s == pytest.approx(2e9, rel=0.1)


def test_too_few_points_and_the_wrong_hardware_are_refused_with_words() -> None:
    one = points(lengths=(256,))
    with pytest.raises(InvalidConfig, match="one length only"):
        fitted(one)
    with pytest.raises(InvalidConfig, match="one batch at one context"):
        fitted(replace(points(), decode=points().decode[:1]))
    with pytest.raises(InvalidConfig, match=r"linear layers reach 5\.\d\d times the nominal figure of host"):
        fitted(points(), gpu=replace(HOST, flops=1e11))
    backwards = replace(points(), prefill=tuple(replace(p, prefill=Sample((1 / p.num_prompt_tokens,))) for p in points().prefill))
    with pytest.raises(InvalidConfig, match=r"64 tokens took 16 ms and 2048 tokens took 0 ms; measure longer"):
        fitted(backwards)
    with pytest.raises(InvalidConfig, match="at least two lengths"):
        Programme(SHOWN, lengths=(64, 64))
    with pytest.raises(InvalidConfig, match="at least two batches or contexts"):
        Programme(SHOWN, batches=(1,), contexts=(128,))


def test_the_file_brings_hardware_and_link_to_the_planning_commands(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    found = fitted(points(), gpu=None, link=None)
    write_profile(path, found, {"model": "SmolLM2-135M"})
    read = read_profile(path)
    assert (read.profile, read.gpu.flops, read.link.bytes_per_s) == (found.profile, found.gpu.flops, found.link.bytes_per_s)
    flags = ["--model", "smollm2-135m", "--profile", str(path)]
    load = ["--rate", "1/s", "--requests", "20", "--prompt", "256", "--output", "20"]
    result = CliRunner().invoke(cli, ["simulate", *flags, *load, "--prefill", "1", "--decode", "1", "--format", "json"])
    assert result.exit_code == 0 and "over mine" in json.loads(result.output)["cluster"], result.output
    result = CliRunner().invoke(
        cli, ["plan", *flags, *load, "--slo-ttft", "5s", "--slo-tpot", "1s", "--visibility", "full", "--no-sensitivity"]
    )
    assert result.exit_code == 0 and "mine" in result.output, result.output
    cost = ["transfer-cost", *flags, "--prompt", "1k", "--link", "10gbe"]
    assert CliRunner().invoke(cli, cost).exit_code == 0
    endless, deep = "#" * (1 << 20) + "\n", "[" * 5000
    for damage, words in (
        ("format: x", "no profile that"),
        ("- 1", "no profile that"),
        ("{", "cannot read the profile"),
        (endless, "larger than"),
        (deep, "cannot read the profile"),
    ):
        path.write_text(damage)
        result = CliRunner().invoke(cli, cost)
        assert result.exit_code == 2 and words in result.output
    path.write_text("format: shoal-profile-1\nprofile: {gemn: 1}\ngpu: {}\nlink: {}\n")
    assert "a profile has no 'gemn'" in CliRunner().invoke(cli, cost).output


def test_the_picture_is_well_formed_and_names_its_points() -> None:
    measured = points()
    found = fitted(measured)
    rows = residuals(measured, found.machine, found.wire)
    for shown in (rows, []):
        picture = ElementTree.fromstring(residual_svg(shown, "a < b"))
        dots = [dot for dot in picture.iter("{http://www.w3.org/2000/svg}circle") if dot[0].text]
        assert len(dots) == len(shown)


@given(st.integers(0, 10_000))
def test_least_squares_are_non_negative_and_no_other_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)) * 10.0 ** rng.integers(-6, 6, 5), rng.normal(size=12)
    found = non_negative(matrix, target)
    assert (found >= 0).all()
    slope = matrix.T @ (matrix @ found - target) / np.linalg.norm(matrix, axis=0)
    assert (slope > -1e-6).all() and (np.abs(slope[found > 0]) < 1e-6).all()  # the conditions of Karush, Kuhn and Tucker


def test_nobody_to_measure_ends_in_one_line(tmp_path: Path) -> None:
    out = str(tmp_path / "x.yaml")
    result = CliRunner().invoke(cli, ["calibrate", "--address", "127.0.0.1:9", "--out", out])
    assert result.exit_code != 0 and "127.0.0.1:9" in result.output and not (tmp_path / "x.yaml").exists()
    result = CliRunner().invoke(cli, ["calibrate", "--address", "127.0.0.1:9", "--lengths", "64"])
    assert result.exit_code == 2 and "at least two lengths" in result.output


def test_pools_that_share_a_host_are_told_from_noise() -> None:
    """Decode loses 10 % of the time that prefill steps, and 20 ms to each request that joins."""
    alone = Sample((1.0, 1.02, 0.98))
    crowd = []
    for length, prefill_s, interval_s in ((64, 0.08, 0.1), (1024, 0.8, 0.9)):
        lost = 0.1 * prefill_s / interval_s + 0.02 / interval_s
        took = Sample((prefill_s, prefill_s))
        crowd.append(CrowdPoint(length, interval_s, alone, Sample((1 / (1 - lost),)), took, took))
    found = fitted(replace(points(), crowd=tuple(crowd))).profile
    assert found.crowd_decode == pytest.approx(0.1) and found.join_s == pytest.approx(0.02) and found.crowd_prefill == 0.0
    noisy = tuple(replace(point, step_alone=Sample((1.0, 1.7, 0.6))) for point in crowd)
    assert fitted(replace(points(), crowd=noisy)).profile.crowd_decode == 0.0
    assert found.name == "mine"


class PrefillsShortOnesOnDecode:
    """A server whose answers say that prompts below 128 tokens were prefilled on decode; a token takes 2 ms."""

    async def generate(self, prompt: object = None, *, timeout_s: float | None = None, **options: Any) -> Any:
        length, num_tokens = len(options["token_ids"]), options["sampling"].max_tokens
        at = "decode_worker" if length < 128 else "prefill_worker"
        for token in range(num_tokens):
            await asyncio.sleep(0.002)
            yield Chunk("x", (token,))
        timings = Timings(0.0, 0.0, 0.0 if length < 128 else length / 1000, 0.1, 2.0, 3.0, 2.0, 10.0)
        transfer = Transfer(length, length, length, 1, "", "decode-0", at)
        yield Completion("r", "x", (0,), "length", None, length, num_tokens, 0, "full", 0, transfer, timings, 0, 0, 0, ())


async def test_lengths_that_decode_prefills_are_left_out_and_the_flag_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.simulator.calibration.measure._WINDOW_S", 0.02)

    async def of(*lengths: int) -> Measured:
        programme = Programme(SHOWN[:1], lengths, batches=(1, 2), contexts=(128,), repeats=1, num_steps=8)
        return await measure(PrefillsShortOnesOnDecode(), MODEL, 1000, programme, token_budget=512, told=lambda *_: None)

    measured = await of(64, 256, 512)
    assert [point.num_prompt_tokens for point in measured.prefill] == [256, 512]
    assert [point.num_prompt_tokens for point in measured.crowd] == [256, 512]
    (note,) = measured.notes
    assert "prompts of 64 tokens" in note and "--local-prefill-tokens 0" in note
    assert note in fitted(replace(points(), notes=measured.notes)).notes
    assert (await of(128, 256)).notes == ()
    with pytest.raises(InvalidConfig, match=r"prompts of 32, 64 tokens .*--local-prefill-tokens 0.*--lengths"):
        await of(32, 64, 256)
    once = residuals(measured, Machine(HOST, TRUTH), Wire.of(LINK, Machine(HOST, TRUTH)))
    assert {row.spread for row in once if row.what != "decode step"} == {None}
