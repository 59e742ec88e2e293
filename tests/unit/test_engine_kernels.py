"""The compiled kernels against plain arithmetic: shapes with tails, both types, one and more threads, both products."""

import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.engine.attention import attention_backend
from shoal.engine.kernels import kernels
from shoal.engine.kernels.cpu import InstructionSet
from shoal.engine.kv_pool import KvPool
from shoal.engine.layer_backend import LayerBackend, StageRows, StageWork
from shoal.engine.native_layers import NativeLayers
from shoal.engine.query_runs import QueryRun, SlotGeometry, visible
from shoal.engine.rope import Frequencies
from shoal.engine.stages import RowGroup, Stage
from shoal.engine.torch_attention import TorchAttention
from shoal.engine.torch_layers import TorchLayers
from shoal.engine.weights import LayerWeights
from shoal.model_files import Activation, DecoderConfig, RopeConfig
from shoal.types import DType, ModelShape
from tests import engine_support as support

pytestmark = pytest.mark.skipif(bool(support.NATIVE_MISSING), reason=support.NATIVE_MISSING)

DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
TOLERANCE = {DType.FLOAT32: 2e-5, DType.BFLOAT16: 0.02}


@pytest.fixture(params=itertools.product((1, 2), ("words", "floats", "amx")), ids=lambda case: f"{case[0]}-{case[1]}")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads, and what multiplies bfloat16: products of its words, floats, or the tile unit where there is one."""
    num_threads, unit = request.param
    library = kernels()
    if unit == "amx" and not library.uses_amx:
        pytest.skip("no AMX here")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    library.use_amx(unit == "amx")
    library.use_floats(unit == "floats")
    yield num_threads
    library.use_amx(library.uses_amx)
    library.use_floats(library.uses_floats)
    torch.set_num_threads(before)


def shape(heads: int, kv_heads: int, head_dim: int, hidden: int = 96, ffn: int = 72) -> ModelShape:
    return ModelShape(
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        vocab_size=9,
        max_context=4096,
    )


def exact_attention(q: torch.Tensor, data: torch.Tensor, run: QueryRun, window: int | None) -> torch.Tensor:
    """[rows, heads, d] in float64."""
    block_size, kv_heads = data.shape[3], data.shape[2]
    slots = np.arange(run.num_slots)
    kv = data[torch.from_numpy(run.block_ids[0, slots // block_size].astype(np.int64)), :, :, slots % block_size].double()
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in kv.unbind(1))  # [slots, heads, d]
    scores = torch.einsum("rhd,shd->hrs", q.double(), k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible([run], [0], run.num_slots, window)[0], -math.inf)
    return torch.einsum("hrs,shd->rhd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 80, 16), (14, 2, 64, 32), (8, 1, 128, 7), (6, 2, 24, 4)],
)
@pytest.mark.parametrize("window", [None, 37])
def test_attention(
    threads: int, dtype: DType, heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    """Single rows deep in a context (cut into parts), a few rows, whole prompts and later chunks; `speed` gaps and sinks."""
    dims = shape(heads, kv_heads, head_dim)
    torch.manual_seed(heads)
    lengths = [(1, 700), (1, 0), (2, 130), (3, 333), (150, 0), (61, 270), (1, 64)]
    geometries = [SlotGeometry(), SlotGeometry(), SlotGeometry(3, 50, True), SlotGeometry(), SlotGeometry(), SlotGeometry(2, 9)]
    blocks = list(range(1, 1 + sum(-(-(rows + start) // block_size) for rows, start in lengths)))
    random.Random(head_dim).shuffle(blocks)
    data = torch.full((len(blocks) + 1, 2, kv_heads, block_size, head_dim), math.nan, dtype=DTYPES[dtype])
    runs: list[QueryRun] = []
    for (rows, start), geometry in zip(lengths, [*geometries, SlotGeometry()], strict=True):
        ids = np.array([[blocks.pop() for _ in range(-(-(rows + start) // block_size))]], dtype=np.int32)
        run = QueryRun(sum(r.num_rows for r in runs), rows, start, ids, geometry)
        for slot in range(run.first_visible_slot(window), run.num_slots):  # everything else stays NaN
            data[ids[0, slot // block_size], :, :, slot % block_size] = torch.randn(2, kv_heads, head_dim)
        runs.append(run)
    q = torch.randn(sum(run.num_rows for run in runs), heads + 2, head_dim).to(data.dtype)[:, 1:-1] * 2  # rows lie apart
    rows_view = data.view(-1, head_dim)
    prepared = attention_backend("native").prepare(runs, window, dims, rows_view, block_size)
    out = prepared.attend(q, None, rows_view, 0)
    assert out.is_contiguous()
    known = data.nan_to_num()
    for run in runs:
        own = slice(run.first_row, run.first_row + run.num_rows)
        worst = (out[own].double() - exact_attention(q[own], known, run, window)).abs().max().item()
        assert worst < TOLERANCE[dtype], run


def attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last rows of a context of one head, q [rows, 64], over K and V [slots, 64], a multiple of 16."""
    num_slots = len(keys)
    data = torch.stack([keys, values]).view(2, 1, num_slots // 16, 16, 64).permute(2, 0, 1, 3, 4).contiguous()
    ids = np.arange(num_slots // 16, dtype=np.int32)[None]
    run = QueryRun(0, len(q), num_slots - len(q), ids, SlotGeometry())
    rows_view = data.view(-1, 64)
    prepared = attention_backend("native").prepare([run], None, shape(1, 1, 64), rows_view, 16)
    return prepared.attend(q[:, None].contiguous(), None, rows_view, 0)[:, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_long_context_weighs_no_more_than_one(threads: int, dtype: DType, num_rows: int) -> None:
    """Each of 128 blocks of keys once took a little from the sum of weights alone."""
    keys = torch.zeros(32_768, 64)
    keys[0, 0] = 40.0  # with q: 5 nats above the others, from the first block on
    q = torch.zeros(num_rows, 64)
    q[:, 0] = 1.0
    out = attend_one(*(t.to(DTYPES[dtype]) for t in (q, keys, torch.ones(32_768, 64))))
    assert (out.double() - 1).abs().max() < 1e-3  # what sums of so many floats lose is 3e-4


@pytest.mark.parametrize("num_rows", [1, 16])
def test_what_is_denormal_is_zero(threads: int, num_rows: int) -> None:
    """A weight 95 nats below the best, or such a value, takes a product of floats a hundred times as long: it is flushed."""
    keys = torch.full((512, 64), 0.0)
    keys[1:, 0] = -760.0
    q = torch.zeros(num_rows, 64)
    q[:, 0] = 1.0  # scores 0 and −95, scaled by 1 / 8
    values = torch.full((512, 64), 1e36)  # times e^−95, 511 of them: 0.03
    values[0] = 1e-39
    out = attend_one(*(t.bfloat16() for t in (q, keys, values)))
    assert not out.any()


def config(dims: ModelShape, bias: bool, norms: bool) -> DecoderConfig:
    return DecoderConfig(
        shape=dims,
        architecture="llama",
        rms_eps=1e-5,
        rope=RopeConfig(theta=100.0),
        qkv_bias=bias,
        qk_norm=norms,
        tied_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(0,),
    )


def random_weights(dims: ModelShape, bias: bool, norms: bool) -> LayerWeights:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes) / sizes[-1] ** 0.5

    width, rows = dims.num_heads * dims.head_dim, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim
    return LayerWeights(
        input_norm=normal(dims.hidden_size) + 1,
        qkv_weight=normal(rows, dims.hidden_size),
        qkv_bias=normal(rows) if bias else None,
        q_norm=normal(dims.head_dim) + 1 if norms else None,
        k_norm=normal(dims.head_dim) + 1 if norms else None,
        output_weight=normal(dims.hidden_size, width),
        post_norm=normal(dims.hidden_size) + 1,
        gate_up_weight=normal(2 * dims.intermediate_size, dims.hidden_size),
        down_weight=normal(dims.hidden_size, dims.intermediate_size),
    )


def cast(weights: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    values = {name: getattr(weights, name) for name in LayerWeights.__dataclass_fields__}
    return LayerWeights(**{name: None if value is None else value.to(dtype) for name, value in values.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "hidden", "ffn", "bias", "norms"),
    [(9, 3, 64, 576, 1536, False, False), (4, 1, 24, 50, 70, True, False), (2, 2, 80, 90, 34, False, True)],
)
@pytest.mark.parametrize("num_rows", [1, 2, 17, 130, 400])
def test_layer(
    threads: int,
    dtype: DType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    ffn: int,
    bias: bool,
    norms: bool,
    num_rows: int,
) -> None:
    """A whole layer, its K and V in the pool, K and V alone, and the scores: each against torch in float32."""
    dims = shape(heads, kv_heads, head_dim, hidden, ffn)
    settings = config(dims, bias, norms)
    torch.manual_seed(num_rows)
    native = NativeLayers(settings, DTYPES[dtype])
    plain = TorchLayers(settings, torch.float32, TorchAttention())
    weights = cast(random_weights(dims, bias, norms), DTYPES[dtype])
    x = torch.randn(num_rows, hidden).to(native.dtype)
    head, final = torch.randn(41, hidden).to(native.dtype), (torch.rand(hidden) + 0.5).to(native.dtype)

    def everything(layers: LayerBackend, own: LayerWeights, own_type: DType) -> list[torch.Tensor]:
        like, pools = own.input_norm, [KvPool(dims, num_rows // 4 + 2, 4, own_type) for _ in range(2)]
        slots = torch.arange(num_rows)
        group = RowGroup(None, (slots // 4 + 1).view(1, -1), slots % 4)
        ids = np.arange(1, num_rows // 4 + 2, dtype=np.int32).reshape(1, -1)
        turn = Frequencies.of(settings).rotations(slots, layers.rotation_dtype)
        layers.hold({0: own}, {1: own.kv})
        rows = StageRows(group, x.to(like), turn)
        full = Stage(range(1), group, None, (QueryRun(0, num_rows, 0, ids, SlotGeometry()),))
        done = layers.run(StageWork(full, StageRows(group, x.to(like, copy=True), turn), None, pools[0]))
        assert list(done.layers(lambda layer: False)) in ([], [0])
        for pool, layer in ((pools[1], 0), (KvPool(dims, num_rows // 4 + 2, 4, own_type), 1)):
            kv_only = layers.run(StageWork(Stage(range(layer, layer + 1), None, group, ()), None, rows, pool))
            assert list(kv_only.layers(lambda layer: True)) == [layer]
            assert torch.equal(pool.data, pools[1].data)
        scores = layers.score(x.to(like), final.to(like), head.to(like))
        assert done.x is not None
        return [pools[0].data, pools[1].data, done.x, scores / hidden**0.5]

    expected = everything(plain, cast(weights, torch.float32), DType.FLOAT32)
    for own, other in zip(everything(native, weights, dtype), expected, strict=True):
        assert other.abs().max() > 0.5
        scale = other.abs().clamp(min=1.0)
        assert ((own.float() - other).abs() / scale).max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "gate"), [(Activation.GELU_TANH, -1e14), (Activation.SILU, -3e38), (Activation.SILU, 80.0)]
)
def test_activations_of_numbers_whose_exponential_is_no_float(
    threads: int, dtype: DType, activation: Activation, gate: float
) -> None:
    """One row of ones, attention that adds nothing, gates that are all the same: what torch's own operations make of it."""
    hidden, like, dims = 16, DTYPES[dtype], shape(1, 1, 8, hidden=16, ffn=16)
    settings = replace(config(dims, bias=False, norms=False), activation=activation)
    ones, gates = torch.ones(hidden), torch.full((16, hidden), gate / hidden)
    gate_up = torch.cat([gates, torch.full((16, hidden), 1 / hidden)])
    weights = LayerWeights(
        *(t.to(like) for t in (ones, torch.zeros(24, hidden))), None, None, None,
        *(t.to(like) for t in (torch.zeros(hidden, 8), ones, gate_up, torch.eye(hidden))),
    )  # fmt: skip

    def last_row(layers: LayerBackend) -> torch.Tensor:
        slots = torch.arange(1)
        group = RowGroup(None, torch.ones(1, 1, dtype=torch.int64), slots)
        stage = Stage(range(1), group, None, (QueryRun(0, 1, 0, np.ones((1, 1), np.int32), SlotGeometry()),))
        layers.hold({0: weights}, {})
        rows = StageRows(
            group, torch.ones(1, hidden, dtype=like), Frequencies.of(settings).rotations(slots, layers.rotation_dtype)
        )
        pool = KvPool(dims, 2, 4, dtype)  # a stage holds its address only
        done = layers.run(StageWork(stage, rows, None, pool))
        assert list(done.layers(lambda layer: False)) == [] and done.x is not None
        return done.x.float()

    native = last_row(NativeLayers(settings, like))
    assert torch.allclose(native, last_row(TorchLayers(settings, like, TorchAttention())), rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_denormal_rows_of_the_head_score_nothing(threads: int, dtype: DType, num_rows: int) -> None:
    head = torch.full((40, 64), 1e-39).to(DTYPES[dtype])
    x = torch.ones(num_rows, 64).to(DTYPES[dtype])
    assert not kernels().score(x, torch.ones(64).to(DTYPES[dtype]), head, 1e-5).any()


def test_the_same_by_avx2_where_there_is_more() -> None:
    """Half of the tests above, in a process of their own, with what processors without AVX-512 run."""
    if kernels().instructions is InstructionSet.AVX2:
        pytest.skip("all tests here ran by AVX2")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "1-floats", __file__]
    done = subprocess.run(
        command, env={**os.environ, "SHOAL_INSTRUCTIONS": "avx2"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
