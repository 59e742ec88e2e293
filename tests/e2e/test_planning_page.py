"""The planning page in a real Chromium: its controls are clicked, what it shows changes, and it fits a phone."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.cli.plan import plan
from shoal.cli.plan_server import make_server
from tests.browser import MISSING, Browser, browser

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

FLAGS = ["--model", "llama-3.1-8b", "--rate", "15/s", "--prompt", "4k", "--output", "40", "--requests", "60"]
FLAGS += ["--slo-ttft", "600ms", "--slo-tpot", "20ms", "--visibility", "full,speed:24"]
DRAWN = "return !document.getElementById('report').hidden && document.getElementById('advice').textContent"
OVERFLOW = "return document.documentElement.scrollWidth - window.innerWidth"
INK = """  // how many pixels of a canvas are not blank
const canvas = document.getElementById(arguments[0]);
const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
let ink = 0; for (let i = 3; i < data.length; i += 4) ink += data[i] > 0; return ink;"""
CHARTS = ("cost-ttft", "cost-tpot", "ttft", "tpot", "resources", "memory", "timeline", "needs")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    context = plan.make_context("plan", list(FLAGS))
    flags = {key: value for key, value in context.params.items() if key not in ("output", "sensitivity", "html", "serve", "port")}
    server = make_server(flags, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def keep(window: Browser, folder: Path, name: str) -> None:
    """A screenshot, where somebody wants to look at it: SHOAL_SCREENSHOTS=folder."""
    window.screenshot(Path(os.environ.get("SHOAL_SCREENSHOTS") or folder) / f"{name}.png")


def submit(window: Browser) -> str:
    """Press the button; what the page then advises."""
    before = window.run("return document.getElementById('advice').textContent")
    window.click("form button")
    window.until("return document.getElementById('status').hidden || document.getElementById('status').className === 'error'")
    after: str = window.run("return document.getElementById('advice').textContent")
    assert before is not None
    return after


def test_the_form_plans_and_every_control_changes_what_is_shown(address: str, tmp_path: Path) -> None:
    with browser() as window:
        window.open(address)
        assert window.run("return document.getElementById('report').hidden")
        first = submit(window)
        assert "Cheapest: Llama-3.1-8B" in first
        blank = [chart for chart in CHARTS if window.run(INK, chart) < 500]
        assert not blank, f"nothing is drawn in {blank}"
        keep(window, tmp_path, "page")
        # another plan
        picked = window.run("return document.getElementById('picked').textContent")
        times = window.run("return document.getElementById('times').textContent")
        window.run("const pick = document.getElementById('pick'); pick.selectedIndex = (pick.selectedIndex + 1) % pick.length;"
                   "pick.dispatchEvent(new Event('change'))")  # fmt: skip
        assert window.run("return document.getElementById('times').textContent") != times
        assert window.run("return document.getElementById('picked').textContent") != picked
        # a point of the chart
        chosen = window.run("return document.getElementById('pick').selectedIndex")
        x, y = window.run(
            "const chart = Chart.getChart('cost-ttft'), at = chart.getDatasetMeta(0).data.find((_, i) => "
            "chart.data.datasets[0].data[i].index !== arguments[0]), box = chart.canvas.getBoundingClientRect();"
            "chart.canvas.scrollIntoView({block: 'center'}); return [at.x - box.width / 2, at.y - box.height / 2]",
            chosen,
        )
        window.tap("#cost-ttft", x, y)
        assert window.until("return document.getElementById('pick').selectedIndex !== " + str(chosen))
        # other traffic, other advice
        window.type("[name=rate]", "40/s")
        second = submit(window)
        assert second != first and "Cheapest" in second
        # a target that nothing meets, then back
        window.type("[name=ttft_target]", "1ms")
        submit(window)
        assert "over the target of 1 ms" in window.run("return document.getElementById('status').textContent")
        keep(window, tmp_path, "refused")
        window.type("[name=ttft_target]", "600ms")
        window.type("[name=rate]", "15/s")
        assert submit(window) == first
        assert [message for message in window.errors() if "400" not in message] == []  # the refusal is a 400


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_wider_than_a_phone(address: str, tmp_path: Path, width: int) -> None:
    with browser(width, 780, is_phone=True) as window:
        window.open(address)
        assert window.run(OVERFLOW) <= 0
        submit(window)
        assert window.run(OVERFLOW) <= 0
        small = window.run("return [...document.querySelectorAll('input, select, button')].filter((each) => "
                           "each.getBoundingClientRect().height < 32).map((each) => each.name || each.id)")  # fmt: skip
        assert small == [], "too small for a finger"
        keep(window, tmp_path, f"phone-{width}")
        assert window.errors() == []


def test_the_report_file_draws_without_a_network(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = CliRunner().invoke(cli, ["plan", *FLAGS, "--html", str(path)])
    assert result.exit_code == 0, result.output
    with browser() as window:
        window.open(path.as_uri())
        assert window.until(DRAWN)
        assert not [chart for chart in CHARTS if window.run(INK, chart) < 500]
        assert window.run("return document.getElementById('form').hidden") and window.errors() == []
        keep(window, tmp_path, "report")
