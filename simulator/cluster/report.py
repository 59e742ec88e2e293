"""An outcome as tables of text. Knows layout and units; computes nothing."""

from dataclasses import dataclass

from shoal.simulator.cluster.outcome import Outcome, Percentiles
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec


@dataclass(frozen=True, slots=True)
class TimeRow:
    """One quantity's percentiles in milliseconds."""

    what: str
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """How full one resource was."""

    resource: str
    counted: str
    mean_share: float
    peak_share: float | None


TIME_HEADINGS = {"what": "", "mean_ms": "mean ms", "p50_ms": "p50", "p90_ms": "p90", "p95_ms": "p95", "p99_ms": "p99"}
RESOURCE_HEADINGS = {"resource": "resource", "counted": "counted", "mean_share": "mean", "peak_share": "peak"}


def time_rows(outcome: Outcome) -> list[TimeRow]:
    """TTFT, its parts, TPOT and single gaps."""
    named = {
        "TTFT": outcome.ttft_s,
        "  of it queueing": outcome.queueing_s,
        "  of it exposed transfer": outcome.exposed_s,
        "TPOT (per request)": outcome.tpot_s,
        "ITL (every gap)": outcome.itl_s,
    }
    return [TimeRow(name, *_milliseconds(values)) for name, values in named.items()]


def resource_rows(outcome: Outcome) -> list[ResourceRow]:
    """Every resource at its fullest worker."""
    return [ResourceRow(resource.name, resource.what, resource.mean, resource.peak) for resource in outcome.resources]


def summary_lines(spec: ClusterSpec, outcome: Outcome) -> list[str]:
    """What was run, what came out, what is fullest, what it costs."""
    slo = spec.slo
    lines = [
        describe(spec),
        f"{outcome.num_finished:,} requests served in {outcome.duration_s:,.1f} s, {outcome.num_refused:,} refused"
        + "".join(f"; {reason}: {count:,}" for reason, count in outcome.refused.items()),
        f"SLO TTFT ≤ {1e3 * slo.ttft_s:g} ms and TPOT ≤ {1e3 * slo.tpot_s:g} ms: met by {100 * outcome.slo_attainment:.2f}%, "
        f"goodput {outcome.goodput_per_s:.3f} requests/s",
        f"{outcome.output_tokens_per_s:,.0f} output tokens/s, {outcome.total_tokens_per_s:,.0f} tokens/s in all, "
        f"{outcome.wire_bytes / 1e9:,.1f} GB over the links, {100 * outcome.cached_share:.1f}% of prompt tokens cached",
        f"fullest resource: {outcome.bottleneck}",
    ]
    if outcome.num_deaths:
        lines.append(f"{outcome.num_deaths} workers died, {outcome.num_resumed:,} requests went on elsewhere")
    if outcome.num_preempted:
        lines.append(f"{outcome.num_preempted:,} times a request gave its blocks up for others")
    for pool in dict.fromkeys(each.pool for each in outcome.resized):
        sizes = [each for each in outcome.resized if each.pool == pool]
        shown = ", ".join(f"{each.num_workers} at {each.at_s:,.0f} s" for each in sizes[:8])
        lines.append(f"{pool} resized {len(sizes)} times: {shown}{', …' if len(sizes) > 8 else ''}")
    if outcome.usd_per_hour is not None and outcome.usd_per_million_output is not None:
        gpus = f"{outcome.num_gpus} GPUs{' at the start' if outcome.resized else ''}"
        lines.append(
            f"{gpus}, {outcome.usd_per_hour:.2f} USD/h: {outcome.usd_per_million_output:.3f} USD per million "
            f"output tokens, {outcome.usd_per_million_tokens:.3f} per million tokens of both kinds"
        )
    return lines


def describe(spec: ClusterSpec) -> str:
    """The cluster in one line."""

    def pools(given: tuple[PoolSpec, ...]) -> str:
        return " + ".join(
            f"{p.count} × {p.machine.gpu.name}" + (f" (TP {p.machine.tensor_parallel})" if p.machine.tensor_parallel > 1 else "")
            for p in given
        )

    if spec.is_colocated:
        return f"{spec.model.name}, {spec.visibility.policy}, colocated on {pools(spec.decode)}"
    link = spec.link.name if spec.link else "no link"
    return f"{spec.model.name}, {spec.visibility.policy}, prefill {pools(spec.prefill)}, decode {pools(spec.decode)}, over {link}"


def describe_short(spec: ClusterSpec) -> str:
    """The cluster in a few words, for tables."""

    def pools(given: tuple[PoolSpec, ...], letter: str) -> str:
        parts = []
        for pool in given:
            gpu, tp = pool.machine.gpu.name.partition("-")[0], pool.machine.tensor_parallel
            parts.append(f"{pool.count}{letter} {gpu}" + (f" TP{tp}" if tp > 1 else ""))
        return " + ".join(parts)

    if spec.is_colocated:
        return f"{spec.visibility.policy}, colocated: {pools(spec.decode, '×')}"
    return (
        f"{spec.visibility.policy}: {pools(spec.prefill, 'P')}, {pools(spec.decode, 'D')}, {spec.link.name if spec.link else ''}"
    )


def _milliseconds(values: Percentiles) -> tuple[float | None, ...]:
    return tuple(
        None if value is None else 1e3 * value for value in (values.mean, values.p50, values.p90, values.p95, values.p99)
    )
