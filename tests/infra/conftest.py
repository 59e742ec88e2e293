"""What the checks of infra/ share: a test that needs a tool is skipped where `make infra-check` could not get it."""

import pytest

from infra.checks.charts import HELMS, MATRIX, Object, objects, tool


def need(*names: str) -> None:
    """Skip the running test without these tools."""
    for name in names:
        if tool(name) is None:
            pytest.skip(f"{name} is not there: `make infra-check` fetches it")


@pytest.fixture(params=MATRIX)
def values(request: pytest.FixtureRequest) -> str:
    """Each file of the matrix."""
    need("helm4")
    return str(request.param)


@pytest.fixture
def manifests(values: str) -> tuple[Object, ...]:
    """What Helm 4 makes of it."""
    return objects(values)


@pytest.fixture(params=HELMS)
def helm(request: pytest.FixtureRequest) -> str:
    """Both majors of Helm."""
    need(request.param)
    return str(request.param)
