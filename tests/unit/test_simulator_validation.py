"""The published figures stay reproduced, the page says what the code computes, and malformed measurement files are refused."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.errors import InvalidConfig
from shoal.simulator.validation.__main__ import main
from shoal.simulator.validation.measured import summaries
from shoal.simulator.validation.published import comparisons
from shoal.simulator.validation.report import constants_section, published_section
from shoal.simulator.validation.rows import Comparison, ErrorSummary, Use

PAGE = (Path(__file__).parents[2] / "docs" / "validation.md").read_text()


def test_the_page_is_what_the_code_computes() -> None:
    assert published_section(comparisons()) in PAGE
    assert constants_section() in PAGE


def test_every_row_but_the_two_explained_misses_is_met() -> None:
    missed = [(row.what, row.inputs) for row in comparisons() if not row.is_met]
    assert len(missed) == 2
    assert any("TPOT gain at B = 3" in what and "H100" in inputs for what, inputs in missed)
    assert any("short prompt" in what and "a100" in inputs for what, inputs in missed)
    assert {row.use for row in comparisons()} == {Use.FIT, Use.PREDICT}


def test_errors_and_verdicts() -> None:
    row = Comparison("x", Use.PREDICT, "", 10.0, 11.0, "ms", "", 0.05)
    assert row.error == pytest.approx(0.1) and not row.is_met
    inside = Comparison("x", Use.PREDICT, "", 10.0, 11.0, "ms", "", 0.0, 12.0)
    assert inside.error == 0 and inside.is_met
    below = Comparison("x", Use.PREDICT, "", 10.0, 9.0, "ms", "", 0.05, 12.0)
    assert below.error == pytest.approx(-0.1) and not below.is_met
    summary = ErrorSummary.of("x", Use.FIT, "", [-0.2, 0.1, 0.1])
    assert (summary.median_error, summary.median_absolute_error, summary.p90_absolute_error) == (0.1, 0.1, 0.2)


def test_without_measurements_the_table_is_skipped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_VALIDATION_DATA", raising=False)
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 0 and "Skipped: no folder of measurements" in result.output and "SPEED" in result.output


def test_measurements_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "efficiency_from_aic.csv"
    path.write_text("system,phase,ctx,batch,aic_ms\nh100_sxm,prefill,512,1,12.0\nh100_sxm,decode,1024,4,6.6\n")
    rows = summaries(tmp_path)
    assert [row.num_rows for row in rows] == [1, 1] and all(abs(row.median_error) < 0.1 for row in rows)
    result = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert result.exit_code == 0 and "kernel tables" in result.output
    path.write_text("system,phase,ctx,batch,aic_ms\nh100_sxm,prefill,many,1,12.0\n")
    with pytest.raises(InvalidConfig, match="line 2"):
        summaries(tmp_path)
