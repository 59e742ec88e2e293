"""GPUs and links as data. Knows their nominal figures and prices; knows no model and no efficiency."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from shoal.errors import InvalidConfig
from shoal.simulator.units import parse_bandwidth, parse_seconds

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, nominal figures. Rates in FLOP/s and bytes/s, one way."""

    name: str
    flops: float  # F, dense bfloat16
    memory_bytes: float
    memory_bytes_per_s: float  # BW
    nvlink_bytes_per_s: float  # between GPUs of a worker; PCIe where there is no NVLink
    nic_bytes_per_s: float  # network of one GPU
    usd_per_hour: float | None  # median of the listed prices; None where none is listed
    source: str
    fp8_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a prefill worker to a decode worker: nominal bytes/s of one network interface, one way."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


def gpu_from_entry(entry: Json) -> Gpu:
    """An entry of catalogue/hardware.json or of a user's YAML. Raises InvalidConfig that names the entry and the field."""
    name = str(entry.get("name", "unnamed GPU"))
    prices = entry.get("usd_per_hour")
    given = [price for price in (prices if isinstance(prices, list) else [prices]) if price is not None]
    listed = [float(price) for price in given if isinstance(price, int | float) and price >= 0]
    if len(listed) != len(given):
        raise InvalidConfig(f"{name}: usd_per_hour should be a price or a list of prices, not {prices!r}")
    fp8 = entry.get("fp8_tflops")
    return Gpu(
        name=name,
        flops=positive(entry, "bf16_tflops", name) * 1e12,
        memory_bytes=positive(entry, "memory_gb", name) * 1e9,
        memory_bytes_per_s=positive(entry, "memory_gb_s", name) * 1e9,
        nvlink_bytes_per_s=positive(entry, "nvlink_gb_s", name, positive(entry, "pcie_gb_s", name, 32.0)) * 1e9,
        nic_bytes_per_s=positive(entry, "nic_gb_s", name, 12.5) * 1e9,
        usd_per_hour=median(listed) if listed else None,
        source=str(entry.get("source", "given by the user")),
        fp8_flops=None if fp8 is None else positive(entry, "fp8_tflops", name) * 1e12,
    )


def link_from_entry(entry: Json) -> Link:
    """An entry with `gb_s`, or with `bandwidth` and `latency` in words. Raises InvalidConfig."""
    name = str(entry.get("name", "unnamed link"))
    rate = parse_bandwidth(str(entry["bandwidth"])) if "bandwidth" in entry else positive(entry, "gb_s", name) * 1e9
    if "latency" in entry:
        latency = parse_seconds(str(entry["latency"]), allow_zero=True)
    else:
        latency = positive(entry, "latency_s", name, 1e-5)
    return Link(name, rate, latency, str(entry.get("source", "given by the user")))


def link_from_text(text: str) -> Link:
    """A link given by its bandwidth alone, such as `40Gb/s`. Raises InvalidConfig."""
    return Link(text, parse_bandwidth(text), 1e-5, "given by the user")


def with_price(gpu: Gpu, usd_per_hour: float) -> Gpu:
    """The same GPU at another price. Raises InvalidConfig when it is negative."""
    if not usd_per_hour >= 0:
        raise InvalidConfig(f"{gpu.name}: a price of {usd_per_hour} USD per hour makes no sense")
    return replace(gpu, usd_per_hour=usd_per_hour)


def positive(entry: Json, field: str, name: str, default: float | None = None) -> float:
    """A number more than zero. Raises InvalidConfig that names the entry and the field."""
    value = entry.get(field)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidConfig(f"{name}: {field} should be a number more than zero, not {value!r}")
    return float(value)
