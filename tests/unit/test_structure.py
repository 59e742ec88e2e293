"""The shape of the repository: components linked, no Python in proto/, small modules, import rules, nothing pickled."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"
COMPONENTS = (
    "router",
    "prefill_worker",
    "kv_transfer",
    "decode_worker",
    "engine",
    "placement",
    "controller",
    "simulator",
    "quality",
)
MAX_LINES = 400


def python_files() -> list[Path]:
    """Our own sources: components, the import root's plain folders, tests, benchmarks. Generated code is left out."""
    folders = [ROOT / name for name in COMPONENTS] + [PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "infra"]
    files = {path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts}
    return sorted(path for path in files if PACKAGE / "pb" not in path.parents)


def test_every_component_is_linked() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages == set(COMPONENTS), "a component is missing, or a new one is not listed here"
    for name in COMPONENTS:
        link = PACKAGE / name
        assert link.is_symlink(), f"src/shoal/{name} must be a link to ../../{name}"
        assert os.readlink(link) == f"../../{name}"
        assert link.resolve() == ROOT / name


def test_nothing_else_in_the_import_root_is_a_link() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_symlink()} == set(COMPONENTS)


def test_proto_holds_no_python() -> None:
    assert list((ROOT / "proto").rglob("*.proto"))
    assert not list((ROOT / "proto").rglob("*.py"))


def test_modules_are_small() -> None:
    files = python_files()
    assert len(files) > 30
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not too_long, f"split these by idea: {too_long}"


def test_every_module_says_what_it_knows() -> None:
    silent = [str(path.relative_to(ROOT)) for path in python_files() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not [name for name in silent if not name.startswith("tests/")]


def imported_modules(path: Path) -> set[str]:
    """Top-level names a file imports anywhere, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    found = {str(path.relative_to(ROOT)): imported_modules(path) & banned for path in python_files()}
    assert not {name: modules for name, modules in found.items() if modules}


def test_the_search_for_imports_finds_them(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("def f():\n    import pickle as p\n    from cloudpickle.fast import x\n")
    assert imported_modules(sample) == {"pickle", "cloudpickle"}


def test_import_contracts_hold() -> None:
    """The contracts of pyproject.toml, by import-linter, in a process of its own (it changes the import state)."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None, no_cache=True))"
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout and "0 kept" not in result.stdout


@pytest.mark.parametrize("module", ["placement", "router", "client", "cli", "simulator", "model_files", "rpc", "pb.v1"])
def test_light_rooms_import_neither_torch_nor_ray(module: str) -> None:
    """Every module of the room is imported in a fresh interpreter, which then holds neither torch nor Ray."""
    code = (
        "import importlib, pkgutil, sys\n"
        f"room = importlib.import_module('shoal.{module}')\n"
        "for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    if not found.name.endswith(('__main__', 'lm_eval_model')): importlib.import_module(found.name)\n"  # is lm-eval's
        "print(sorted({'torch', 'ray', 'transformers', 'pickle5'} & set(sys.modules)))\n"
    )
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_placement_imports_no_io() -> None:
    banned = {"asyncio", "grpc", "os", "pathlib", "socket", "subprocess", "threading", "time", "datetime", "torch", "ray"}
    for path in (ROOT / "placement").rglob("*.py"):
        assert not imported_modules(path) & banned, path.name


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
