"""The images' files: linted, non-root, pinned, labelled, with a health check; the build script; what the locks hold.

No image engine runs here: an image itself is never built by these tests. `make infra-try` runs the same install steps in a venv.
"""

import re
import subprocess
import tomllib

import pytest

from infra.checks.charts import CHART, ROOT, tool
from tests.infra.conftest import need

IMAGES = ROOT / "infra" / "images"
FILES = ("router", "worker")


def instructions(name: str) -> list[tuple[str, str]]:
    """Of a Containerfile: each instruction's word and rest, continued lines joined, comments left out."""
    lines = [line for line in (IMAGES / f"{name}.Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("name", FILES)
def test_hadolint_is_content(name: str) -> None:
    need("hadolint")
    command = [str(tool("hadolint")), "--config", str(IMAGES / ".hadolint.yaml"), str(IMAGES / f"{name}.Containerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_the_last_stage_runs_as_nobody_and_tells_its_health(name: str) -> None:
    last: list[tuple[str, str]] = []
    stages = 0
    for instruction in instructions(name):
        if instruction[0] == "FROM":
            last, stages = [], stages + 1
        last.append(instruction)
    words = dict(last)
    assert stages >= 2, "what builds must not be in the image"
    assert words["USER"] == "10001:10001" and words["HEALTHCHECK"].endswith('127.0.0.1:50054}\\""]')
    assert not [rest for word, rest in last if word == "RUN" and "pip" in rest], "the last stage installs no Python package"
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/shoal /opt/shoal"]
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in words["LABEL"]


@pytest.mark.parametrize("name", FILES)
def test_bases_and_packages_are_pinned(name: str) -> None:
    found = instructions(name)
    defaults = {rest.split("=")[0]: rest.partition("=")[2] for word, rest in found if word == "ARG"}
    assert re.fullmatch(r"docker\.io/library/python:\d+\.\d+\.\d+-slim-\w+", defaults["PYTHON_IMAGE"])
    for word, rest in found:
        if word == "RUN":
            for call in re.findall(r"pip install ([^&]*)", rest):
                assert "--require-hashes" in call or "--no-deps" in call or "torch==2.13.0" in call, call
    locked = (IMAGES / f"requirements-{name}.txt").read_text()
    names = re.findall(r"^([\w\-\[\],]+)==[^\s]+ \\\n    --hash=sha256:", locked, re.MULTILINE)
    assert len(names) > 30 and len(names) == len(re.findall(r"^[\w\-\[\],]+==", locked, re.MULTILINE))


def test_the_router_has_neither_torch_nor_ray() -> None:
    locked = (IMAGES / "requirements-router.txt").read_text()
    assert not re.findall(r"^(torch|ray|triton|nvidia-[\w-]+)[=\[]", locked, re.MULTILINE)
    assert re.search(r"^ray(\[default\])?==2\.60\.0 ", (IMAGES / "requirements-worker.txt").read_text(), re.MULTILINE)
    assert "ray" not in dict(instructions("router"))["FROM"]


def test_locks_hold_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name, wanted in (
        ("router", project["dependencies"]),
        ("worker", project["dependencies"] + extras["serve"] + extras["vision"]),
    ):
        locked = (IMAGES / f"requirements-{name}.txt").read_text()
        for requirement in wanted:
            package = re.split(r"[\[><=~;! ]", requirement)[0]
            assert package == "torch" or re.search(rf"^{package}(\[\w+\])?==", locked, re.MULTILINE), (
                f"{package}: run infra/images/lock.sh"
            )


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart, values = (CHART / "Chart.yaml").read_text(), (CHART / "values.yaml").read_text()
    assert f'appVersion: "{version}"' in chart
    ray = re.search(r'^  version: "([\d.]+)"  # of the worker image', values, re.MULTILINE)
    assert ray is not None
    assert re.search(rf"^ray(\[default\])?=={ray[1]} ", (IMAGES / "requirements-worker.txt").read_text(), re.MULTILINE)
    torch = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE)
    assert torch is not None and f"torch=={torch[1]}" in (IMAGES / "worker.Containerfile").read_text()
    for name in FILES:
        assert f"ARG VERSION={version}\n" in (IMAGES / f"{name}.Containerfile").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["router"], "router.Containerfile --tag ghcr.io/shoal-serving/shoal-router:0.1.0 "),
        (["worker-cuda"], "--tag ghcr.io/shoal-serving/shoal-worker:0.1.0-cuda "),
        (["worker-cpu", "--push"], "push ghcr.io/shoal-serving/shoal-worker:0.1.0-cpu\n"),
    ],
)
def test_the_build_script_says_what_it_would_run(arguments: list[str], words: str) -> None:
    done = subprocess.run([str(IMAGES / "build.sh"), *arguments, "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0 and words in done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [[], ["everything"], ["router", "--puhs"]])
def test_the_build_script_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    done = subprocess.run([str(IMAGES / "build.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "worker-cuda" in done.stderr


@pytest.mark.parametrize("script", ["build.sh", "lock.sh", "try.sh"])
def test_scripts_are_bash(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(IMAGES / script)], capture_output=True).returncode == 0


def test_the_steps_tried_in_a_venv_are_the_images() -> None:
    """Each pip call of the last build stage stands in try.sh, too; and what .dockerignore lets through is what it copies."""
    tried = (IMAGES / "try.sh").read_text()
    for call in (
        "--require-hashes -r",
        "--no-deps --no-build-isolation --wheel-dir",
        "pip uninstall --quiet --yes pip setuptools",
    ):
        assert call in tried
        assert call.replace(" --quiet", "") in (IMAGES / "router.Containerfile").read_text()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")} - {
        "infra/images/requirements-*.txt"
    }
    copied = re.search(r"-cf - ([^|]*)\|", tried)
    assert copied is not None and set(copied[1].replace("\\\n", " ").split()) == kept
