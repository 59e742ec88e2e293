"""The validation page as Markdown. Knows layout; computes nothing."""

from collections.abc import Sequence

from shoal.simulator.profiles import PROFILES
from shoal.simulator.validation.published import fitted_constants
from shoal.simulator.validation.rows import Comparison, ErrorSummary


def published_section(rows: Sequence[Comparison]) -> str:
    """Every published figure beside ours."""
    lines = [
        "| what | use | inputs | published | ours | error | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        published = f"{row.published:.4g}" if row.published_high is None else f"{row.published:.4g} … {row.published_high:.4g}"
        verdict = "ok" if row.is_met else "**miss**"
        lines.append(
            f"| {row.what} | *{row.use}* | {row.inputs} | {published} {row.unit} | {row.ours:.4g} {row.unit} | "
            f"{100 * row.error:+.1f}% | {verdict} |"
        )
    met, judged = sum(row.is_met for row in rows), len(rows)
    lines += ["", f"{met} of {judged} rows within their tolerance."]
    return "\n".join(lines)


def constants_section() -> str:
    """The fitted numbers."""
    return "\n".join(f"- `{name}`: {fitted_constants(profile)}. {profile.source}." for name, profile in PROFILES.items())


def measured_section(rows: Sequence[ErrorSummary]) -> str:
    """Errors of groups of measured rows."""
    lines = [
        "| what | use | inputs | rows | median error (bias) | median of absolute errors | 90th percentile of it |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.what} | *{row.use}* | {row.inputs} | {row.num_rows} | {100 * row.median_error:+.1f}% | "
        f"{100 * row.median_absolute_error:.1f}% | {100 * row.p90_absolute_error:.1f}% |"
        for row in rows
    ]
    return "\n".join(lines)
