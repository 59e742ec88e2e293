"""Which implementation computes: named, tried, declared. And how the kernels are built: once, atomically, or not at all."""

import importlib.util
import logging
import threading
from pathlib import Path

import pytest
import torch

from shoal.engine import backends
from shoal.engine.backends import choose_backend
from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kernels import KernelsUnavailable, build, library
from shoal.engine.kernels.build import BuildFailed
from shoal.engine.kernels.cpu import InstructionSet
from shoal.errors import InvalidConfig
from shoal.metrics import exposition
from shoal.types import DType
from tests import engine_support as support

CPU = torch.device("cpu")


def test_auto_declares_why_it_is_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def none() -> None:
        raise KernelsUnavailable("the CPU lacks avx512f")

    monkeypatch.setattr(backends, "kernels", none)
    config = support.model_files().config
    with caplog.at_level(logging.WARNING):
        chosen = choose_backend("auto", config, DType.FLOAT32, CPU)
    assert (chosen.name, chosen.reason) == ("torch", "the CPU lacks avx512f")
    assert "several times slower: the CPU lacks avx512f" in caplog.text
    assert b'shoal_engine_backend_info{backend="torch",reason="the CPU lacks avx512f"} 1.0' in exposition()
    with pytest.raises(InvalidConfig, match="native back end cannot run here: the CPU lacks avx512f"):
        choose_backend("native", config, DType.FLOAT32, CPU)
    assert choose_backend("torch", config, DType.FLOAT32, CPU).reason == ""


def test_unknown_names_and_devices() -> None:
    config = support.model_files().config
    with pytest.raises(InvalidConfig, match="unknown back end 'fast'; known: auto, native, triton, torch"):
        choose_backend("fast", config, DType.FLOAT32, CPU)
    with pytest.raises(InvalidConfig, match="native back end cannot run here: no native kernels for cuda"):
        choose_backend("native", config, DType.BFLOAT16, torch.device("cuda"))


def test_a_gpu_takes_triton_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = support.model_files().config
    chosen = choose_backend("auto", config, DType.BFLOAT16, torch.device("cuda"))
    if importlib.util.find_spec("triton"):
        assert str(chosen) == "triton"
    else:
        assert chosen.name == "torch" and "install shoal[cuda]" in chosen.reason
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidConfig, match="triton back end cannot run here: Triton needs a GPU, not cpu"):
        choose_backend("triton", config, DType.BFLOAT16, CPU)


@pytest.mark.skipif(bool(support.NATIVE_MISSING), reason=support.NATIVE_MISSING)
def test_auto_is_native_where_it_works() -> None:
    model = support.model_files()
    held = HeldLayers.everything(model.config.shape.num_layers)
    for dtype in DType:
        assert str(Decoder.load(model, dtype=dtype, held=held)[0].backend) == "native"


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        ({}, "avx512"),
        ({"avx512": ["avx512_bf16"]}, "avx2"),
        ({"avx512": ["avx512_bf16"], "avx2": ["fma"]}, "the CPU lacks fma"),
    ],
)
def test_the_best_instructions_are_taken(monkeypatch: pytest.MonkeyPatch, lacking: dict[str, list[str]], expected: str) -> None:
    asked: list[str] = []

    def refuse(instructions: InstructionSet) -> Path:
        asked.append(instructions)
        raise BuildFailed("not here")

    monkeypatch.delenv("SHOAL_INSTRUCTIONS", raising=False)
    monkeypatch.setattr(library, "missing_features", lambda instructions: lacking.get(instructions, []))
    monkeypatch.setattr(library, "build", refuse)
    with pytest.raises(KernelsUnavailable) as error:
        library.kernels.__wrapped__()
    assert (asked or [str(error.value)]) == [expected]


def test_instructions_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing_features", lambda instructions: ["avx512f"] if instructions == "avx512" else [])
    monkeypatch.setenv("SHOAL_INSTRUCTIONS", "avx512")
    with pytest.raises(KernelsUnavailable, match="the CPU lacks avx512f"):
        library.kernels.__wrapped__()
    monkeypatch.setenv("SHOAL_INSTRUCTIONS", "sse")
    with pytest.raises(InvalidConfig, match="SHOAL_INSTRUCTIONS is 'sse'; known: avx512, avx2"):
        library.kernels.__wrapped__()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        build.build(InstructionSet.AVX2, tmp_path)


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no such instruction" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildFailed, match="no such instruction"):
        build.build(InstructionSet.AVX2, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildFailed, match="SHOAL_CACHE_DIR"):
        build.build(InstructionSet.AVX2, tmp_path / "file" / "cache")


def test_builders_at_the_same_time_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_slowly(compiler: str, flags: tuple[str, ...], scratch: Path) -> Path:
        compiled.append(compiler)
        threading.Event().wait(0.05)
        (scratch / "library.so").write_bytes(b"library")
        return scratch / "library.so"

    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(build, "_compile", compile_slowly)
    found: list[Path] = []
    builders = [threading.Thread(target=lambda: found.append(build.build(InstructionSet.AVX2, tmp_path))) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(compiled) == 1 and len(set(found)) == 1 and len(found) == 4
    assert found[0].read_bytes() == b"library"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # scratch is gone


def test_sources_ship_with_the_package() -> None:
    names = {path.name for path in build.SOURCES.iterdir()}
    assert {"layer.cpp", "prefill.cpp", "decode.cpp", "gemm.h"} <= names
    package_data = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"shoal.engine.kernels" = ["source/*.cpp", "source/*.h"]' in package_data
