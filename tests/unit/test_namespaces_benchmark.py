"""The benchmark over shaped links: what is predicted for a link, and the tables."""

import math
from pathlib import Path

from benchmarks.namespaces import OPEN, Cell, byte_table, predicted_ms, spec_of, table
from benchmarks.netns import Net
from benchmarks.two_nodes import PLACES, ray_start, serve_config
from shoal.config.serve import ServeConfig
from shoal.placement.arithmetic import wire_bytes
from shoal.simulator.calibration.fit import Fit
from shoal.simulator.hardware import Gpu, Link
from shoal.simulator.profiles import PROFILES
from shoal.types import DType
from shoal.visibility import Visibility

MODEL = spec_of("smollm2-135m", "bfloat16")
FITTED = Fit(Gpu("cpu", 2e11, 4e9, 1e10, 1e10, 1e10, None, "test"), Link("as it is", 1e9, 0.0, "test"), PROFILES["ideal"], ())
FULL, POP = (Visibility.parse(text).resolve(MODEL.shape.num_layers, 1) for text in ("full", "pop:20"))


def test_a_slower_link_exposes_more_and_the_prediction_ends_in_its_rate() -> None:
    exposed = {link: predicted_ms(MODEL, FITTED, link, 512, FULL)[0] for link in (OPEN, "10gbe", "1gbe", "10Mb/s")}
    assert exposed[OPEN] == exposed["10gbe"] < exposed["1gbe"] < exposed["10Mb/s"]  # the machine itself moves 1 GB/s
    crossing_ms = 1e3 * wire_bytes(MODEL.shape, DType.BFLOAT16, FULL, 512) / (1e7 / 8)
    ttft = predicted_ms(MODEL, FITTED, "10Mb/s", 512, FULL)[1]
    assert math.isclose(ttft, crossing_ms, rel_tol=0.05)  # the link is busy from the first layer on
    assert predicted_ms(MODEL, FITTED, "1gbe", 2048, POP)[0] > predicted_ms(MODEL, FITTED, "1gbe", 2048, FULL)[0]


def test_tables_hold_the_median_and_the_bytes() -> None:
    cell = Cell([700.0, 900.0, 800.0], [650.0, 640.0, 660.0], [3.0, 5.0, 4.0], 11_800_000)
    [_, _, row] = table(MODEL, FITTED, {("1gbe", 512, FULL): cell}).splitlines()
    assert row.startswith("| 1gbe | 512 | `full` | 11.8 MB | 650 ms | 4 (3–5) ms | ") and "800 (700–900) ms" in row
    assert "| prefill | 12.0 MB | 0.1 MB |" in byte_table({"prefill": (12_000_000, 100_000)}, 11_800_000)


def test_nodes_and_controller_are_told_the_same_addresses() -> None:
    net = Net(PLACES)
    head, node = (ray_start(net, pool, Path("x")) for pool in ("prefill", "decode"))
    config = ServeConfig.from_mapping(serve_config(net, "tiny", ["full"]))
    assert f"--address={config.ray_address}" in node and f"--node-ip-address={config.ray_address.split(':')[0]}" in head
    assert head[head.index("--labels") + 1] == "pool=prefill" and node[node.index("--labels") + 1] == "pool=decode"
    assert config.worker_host == "node" and net.command("decode", "true")[:3] == ("ip", "netns", "exec")
