"""Reads the rotary embedding of a Hugging Face config.json, of transformers 4 or 5."""

from shoal.errors import InvalidConfig
from shoal.model_files.families import Family
from shoal.model_files.json_fields import Json, flag, integer, number, object_of
from shoal.model_files.rope import RopeConfig, RopeKind

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def read_ropes(config: Json, family: Family, max_context: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of window layers where they have one of their own. Raises InvalidConfig.

    transformers 5 keeps everything in rope_parameters, by layer type where there are two; older files have rope_theta beside an
    optional rope_scaling, and rope_local_base_freq.
    """
    given = object_of(config, "rope_parameters") or object_of(config, "rope_scaling")
    if family.local_theta is None:
        return _rope(config, given, family.theta, max_context), None
    local = object_of(given, _LOCAL)
    base = {"rope_theta": config.get("rope_local_base_freq")}
    mine = object_of(given, _GLOBAL) if _GLOBAL in given or _LOCAL in given else given
    return _rope(config, mine, family.theta, max_context), _rope(base, local, family.local_theta, max_context)


def read_mrope_section(config: Json) -> tuple[int, int, int]:
    """Pairs that turn by time, height and width. Raises InvalidConfig, also where they are not interleaved."""
    given = object_of(config, "rope_parameters") or object_of(config, "rope_scaling")
    if not flag(given, "mrope_interleaved", True):
        raise InvalidConfig("mrope_interleaved false is not supported")
    section = given.get("mrope_section", [24, 20, 20])
    if not isinstance(section, list) or len(section) != 3 or not all(type(count) is int for count in section):
        raise InvalidConfig(f"mrope_section {section!r} should be three counts")
    return section[0], section[1], section[2]


def _rope(config: Json, given: Json, theta: float, max_context: int) -> RopeConfig:
    outer = ("rope_theta", "original_max_position_embeddings")  # may stand beside the object instead of in it
    rope: Json = {name: config.get(name) for name in outer} | dict(given)
    turned = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if turned not in (None, 1, 1.0):
        raise InvalidConfig(f"partial_rotary_factor {turned} is not supported")
    theta = number(rope, "rope_theta", theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, RopeKind.LINEAR, factor=number(rope, "factor"))
    if kind != "llama3":
        raise InvalidConfig(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    return RopeConfig(
        theta,
        RopeKind.LLAMA3,
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_context=integer(rope, "original_max_position_embeddings", max_context),
    )
