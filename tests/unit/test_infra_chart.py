"""What can be checked of the chart without Helm: the schema, the matrix against it, the committed manifests' command lines."""

import copy
import dataclasses
import json
from typing import Any

import jsonschema
import pytest

from infra.checks import values as chart_values
from infra.checks.charts import CHART, MATRIX, parse, pods
from infra.checks.commands import parsed
from infra.checks.page import PAGE, made
from infra.checks.render import TARGETS
from shoal.config.images import ImageLimits
from shoal.errors import InvalidConfig

SCHEMA = json.loads(chart_values.SCHEMA.read_text())


def merged(base: Any, over: Any) -> Any:
    """As Helm lays values over defaults."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: merged(base.get(key), over[key]) if key in over else base[key] for key in base.keys() | over.keys()}
    return copy.deepcopy(over)


def test_the_schema_is_made_of_the_values_and_takes_them() -> None:
    assert chart_values.schema() == SCHEMA, "run `make infra-render`"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(chart_values.defaults())


@pytest.mark.parametrize("values", MATRIX)
def test_the_matrix_fits_the_schema(values: str) -> None:
    (over,) = parse((CHART / "ci" / f"{values}-values.yaml").read_text()) or ({},)
    jsonschema.Draft7Validator(SCHEMA).validate(merged(chart_values.defaults(), over))


@pytest.mark.parametrize("values", [{"pools": {"prefill": {"replicas": 0}}}, {"tsl": {}}, {"images": {"router": {"tag": 3}}}])
def test_the_schema_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(merged(chart_values.defaults(), values))


def test_images_have_the_limits_of_the_flags() -> None:
    flags, given = ImageLimits(), chart_values.defaults()["promptImages"]
    names = {"maxImages": "max_images", "maxImageMB": "max_image_mb", "maxImagesMB": "max_images_mb"}
    names |= {"maxImageMegapixels": "max_image_megapixels"}
    assert {names[key]: value for key, value in given.items()} == dataclasses.asdict(flags)
    told = SCHEMA["properties"]["promptImages"]["properties"]
    for key, name in names.items():
        if (most := told[key].get("maximum")) is not None:
            dataclasses.replace(flags, **{name: float(most)})
            with pytest.raises(InvalidConfig, match=f"{name} must be at most {most}"):
                dataclasses.replace(flags, **{name: most + 0.5})
    assert [key for key in names if "maximum" not in told[key]] == ["maxImages"]


def test_every_value_has_a_meaning() -> None:
    assert [path for path, _, words in chart_values.rows() if not words] == []


def test_the_page_holds_what_is_made() -> None:
    assert PAGE.read_text() == made(), "run `make infra-render`"


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_manifests_start_real_commands(path: Any) -> None:
    run = [parsed(c)[0] for place in pods(parse(path.read_text())) for c in place.containers if "command" in c]
    assert {"shoal.router", "shoal.launch.controller"} <= set(run)
