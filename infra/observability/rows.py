"""Which panels the dashboard has, row by row: the questions that somebody asks who looks after a cluster. Knows no format."""

from collections.abc import Iterable, Mapping
from typing import Final

from infra.observability.panels import (
    Panel,
    Query,
    Row,
    level,
    mean,
    of_both,
    p95,
    per_second,
    plain_panel,
    quantile,
    quantiles,
    rate,
)
from infra.observability.promql import metrics_in
from shoal.metrics import Declared

_TTFT, _PARTS = "shoal_router_ttft_seconds", ("queue", "prefill", "exposed_transfer")
_ON_PREFILL, _ON_DECODE = ("queue", "compute", "after_compute"), ("queue", "transfer", "first_step")


def rows(known: Mapping[str, Declared]) -> tuple[Row, ...]:
    """Those below, and what no panel of them shows."""
    queries = [query for row in _CHOSEN for panel in row.panels for query in panel.queries]
    shown = {name for query in queries for name in metrics_in(query.expression, known)}
    rest = tuple(plain_panel(metric) for metric in known.values() if metric.name not in shown)
    return (*_CHOSEN, Row("Everything else", rest, folded=True))


def _named(part: str, expression: str) -> Query:
    return Query(expression, part.replace("_", " "))


def _share_of_ttft(part: str) -> Query:
    return _named(part, f"{rate(f'shoal_router_{part}_seconds_sum')} / {rate(_TTFT + '_sum')}")


def _used_share(pool: str) -> Query:
    used, total = (f"sum by (instance) (shoal_{pool}_worker_{what}_blocks)" for what in ("used", "total"))
    return Query(f"{used} / {total}", f"{pool} {{{{instance}}}}")


def _hit_share(pool: str) -> str:
    hits, queries = (f"shoal_{pool}_worker_prefix_{what}_tokens_total" for what in ("hit", "query"))
    return f"{rate(hits)} / {rate(queries)}"


def _parts_p95(room: str, parts: Iterable[str]) -> tuple[Query, ...]:
    return tuple(_named(part, quantile(0.95, f"shoal_{room}_{part}_seconds")) for part in parts)


_SAVED = f"{rate('shoal_router_transfer_saved_bytes_total')} / {rate('shoal_router_transfer_full_depth_bytes_total')}"
_CONTROL = f"{rate('shoal_transfer_control_bytes_total', 'end')} / {rate('shoal_transfer_payload_bytes_total', 'end')}"
_BAD = rate("shoal_router_requests_total", "outcome", matchers='{outcome!~"stop|length|scored"}')

_GLANCE: Final = Row(
    "At a glance",
    (
        Panel("Requests ended", "reqps", per_second("shoal_router_requests_total", "outcome"), stacked=True),
        Panel("Time to first token", "s", quantiles(_TTFT)),
        Panel("Time per output token", "s", quantiles("shoal_router_tpot_seconds")),
        Panel(
            "Tokens",
            "cps",
            per_second("shoal_router_prompt_tokens_total", says="prompt")
            + per_second("shoal_router_generated_tokens_total", says="generated"),
        ),
        Panel("Requests being served", "short", level("shoal_router_active_streams", "instance")),
        Panel("Share of the wire's bytes that visibility saves", "percentunit", (Query(_SAVED, "saved"),)),
    ),
)
_FIRST_TOKEN: Final = Row(
    "Where the time to first token goes",
    (
        Panel(
            "Parts, in the mean",
            "s",
            tuple(_named(part, mean(f"shoal_router_{part}_seconds")) for part in (*_PARTS, "ttft")),
            note="`ttft` is the whole; what the parts leave is the first decode step, tokenising and calls.",
            width=12,
        ),
        Panel("Parts, as shares", "percentunit", tuple(map(_share_of_ttft, _PARTS)), stacked=True, width=12),
        Panel("Time to first token by visibility, p95", "s", p95(_TTFT, "visibility")),
        Panel("Queue, p95", "s", p95("shoal_router_queue_seconds", "visibility")),
        Panel("Prefill, p95", "s", p95("shoal_router_prefill_seconds", "visibility")),
        Panel("On prefill workers, p95", "s", _parts_p95("prefill_worker", _ON_PREFILL)),
        Panel("On decode workers, p95", "s", _parts_p95("decode_worker", _ON_DECODE)),
        Panel("Attempts in each state, p95", "s", p95("shoal_router_attempt_state_seconds", "state")),
    ),
)
_TRANSFER: Final = Row(
    "Transfer",
    (
        Panel("Exposed transfer, p95", "s", p95("shoal_router_exposed_transfer_seconds", "visibility")),
        Panel("Whole transfer, p95", "s", p95("shoal_transfer_duration_seconds", "end")),
        Panel("Crossed", "Bps", per_second("shoal_router_transfer_payload_bytes_total", "visibility"), stacked=True),
        Panel("Saved", "Bps", per_second("shoal_router_transfer_saved_bytes_total", "visibility"), stacked=True),
        Panel(
            "Transfers",
            "cps",
            per_second("shoal_transfer_finished_transfers_total", "end", says="finished")
            + per_second("shoal_transfer_failed_transfers_total", "end", "reason", says="failed")
            + per_second("shoal_transfer_rejected_transfers_total", "reason", says="rejected")
            + per_second("shoal_transfer_expired_transfers_total", says="lease expired"),
        ),
        Panel("Control bytes beside payload", "percentunit", (Query(_CONTROL, "{{end}}"),)),
        Panel(
            "Staging buffers",
            "bytes",
            level("shoal_transfer_staging_bytes", "end", says="in use")
            + level("shoal_transfer_quarantined_bytes", "end", says="in quarantine"),
        ),
        Panel("Pairs", "short", level("shoal_transfer_active_pairs", "end")),
        Panel("Ready and no longer wanted", "Bps", per_second("shoal_transfer_skipped_bytes_total", says="skipped")),
    ),
)
_KV: Final = Row(
    "KV",
    (
        Panel("KV blocks in use", "percentunit", (_used_share("prefill"), _used_share("decode"))),
        Panel("Decode, by group of layers", "short", level("shoal_decode_worker_group_blocks", "group"), stacked=True),
        Panel("Prefill, by group of layers", "short", level("shoal_prefill_worker_group_blocks", "group"), stacked=True),
        Panel("Cached blocks", "short", of_both(lambda pool: f"sum(shoal_{pool}_worker_cached_blocks)")),
        Panel("Cached blocks given up", "cps", of_both(lambda pool: rate(f"shoal_{pool}_worker_evicted_blocks_total"))),
        Panel("Prefill tokens found in the prefix cache", "percentunit", of_both(_hit_share)),
    ),
)
_POOLS: Final = Row(
    "Pools",
    (
        Panel("Workers by state", "short", level("shoal_controller_workers", "pool", "state"), stacked=True),
        Panel("One step, p95", "s", of_both(lambda pool: quantile(0.95, f"shoal_{pool}_worker_step_seconds"))),
        Panel("Requests in one step, in the mean", "short", of_both(lambda pool: mean(f"shoal_{pool}_worker_step_requests"))),
        Panel("Tokens run", "cps", of_both(lambda pool: rate(f"shoal_{pool}_worker_run_tokens_total"))),
        Panel(
            "Restarts and retirements",
            "cps",
            per_second("shoal_controller_restarted_workers_total", "pool", says="restarted")
            + per_second("shoal_controller_retired_workers_total", "pool", says="retired"),
        ),
        Panel("Draining, p95", "s", p95("shoal_controller_drain_seconds", "pool")),
    ),
)
_QUEUE: Final = Row(
    "Queue and overload",
    (
        Panel("Requests that wait for blocks", "short", of_both(lambda pool: f"sum(shoal_{pool}_worker_waiting_requests)")),
        Panel("Predicted wait", "s", quantiles("shoal_router_predicted_wait_seconds")),
        Panel(
            "Refused",
            "reqps",
            per_second("shoal_router_refused_requests_total", "bound", says="early:")
            + per_second("shoal_router_limited_requests_total", "limit", says="tenant's"),
        ),
        Panel(
            "Requests that hold blocks",
            "short",
            level("shoal_prefill_worker_holding_requests", says="prefill")
            + level("shoal_decode_worker_reserved_requests", says="decode"),
        ),
        Panel("Preempted", "reqps", per_second("shoal_decode_worker_preempted_requests_total", says="on decode")),
        Panel("Where prompts run", "reqps", per_second("shoal_router_prefilled_requests_total", "at", "reason"), stacked=True),
    ),
)
_ERRORS: Final = Row(
    "Errors and breakers",
    (
        Panel("Requests that ended badly", "reqps", (Query(_BAD, "{{outcome}}"),), stacked=True),
        Panel(
            "Mended unseen",
            "reqps",
            per_second("shoal_router_retried_requests_total", "reason", says="retried")
            + per_second("shoal_router_resumed_requests_total", says="resumed")
            + per_second("shoal_router_fallback_requests_total", "where", says="fallback"),
        ),
        Panel("Breakers (0 closed, 1 open)", "short", level("shoal_router_breaker_state", "worker", "leg", how="max")),
        Panel("Changes of breakers", "cps", per_second("shoal_router_breaker_transitions_total", "worker", "leg", "state")),
        Panel("Pairs that failed", "cps", per_second("shoal_transfer_failed_pairs_total", "end", "reason")),
        Panel("Stalled workers", "short", level("shoal_engine_stalled_state", "instance", how="max")),
        Panel("Answers of the HTTP door", "reqps", per_second("shoal_router_http_requests_total", "status"), stacked=True),
        Panel("HTTP connections closed unasked", "cps", per_second("shoal_router_closed_connections_total", "reason")),
        Panel("Calls without a valid token", "reqps", per_second("shoal_router_unauthenticated_requests_total", "door")),
        Panel("Lists of workers asked for again", "cps", per_second("shoal_router_reopened_endpoint_streams_total")),
    ),
)
_SCALING: Final = Row(
    "Scaling",
    (
        Panel(
            "Workers needed, wanted and ready",
            "short",
            level("shoal_controller_needed_workers", "pool", says="needed", how="max")
            + level("shoal_controller_desired_workers", "pool", says="wanted", how="max")
            + level("shoal_router_ready_workers", "pool", says="ready", how="max"),
        ),
        Panel("What the need comes from", "short", level("shoal_controller_needed_workers", "pool", "by", how="max")),
        Panel("Forecast", "reqps", level("shoal_controller_forecast_requests", "pool", how="max")),
        Panel(
            "Predicted work over what the pool can do",
            "percentunit",
            level("shoal_controller_utilisation_ratio", "pool", how="max"),
        ),
        Panel("Decisions", "cps", per_second("shoal_controller_scaling_transitions_total", "pool", "decision")),
        Panel(
            "Decisions that could not be carried out",
            "cps",
            per_second("shoal_controller_scaling_failed_transitions_total", "pool", "reason"),
        ),
    ),
)
_QUALITY: Final = Row(
    "Quality",
    (
        Panel("Agreement with full depth", "percentunit", level("shoal_router_quality_agreement_ratio", "visibility", how="min")),
        Panel("KL from full depth, nats per token", "short", level("shoal_router_quality_kl_nats", "visibility", how="max")),
        Panel("Served at full depth instead (1)", "short", level("shoal_router_quality_gate_state", "visibility", how="max")),
    ),
)
_VERSIONS: Final = Row(
    "What runs",
    (
        Panel("Versions", "short", (Query("count by (version, python) (shoal_build_info)"),), table=True, width=12),
        Panel("Back ends", "short", (Query("count by (backend, reason) (shoal_engine_backend_info)"),), table=True, width=12),
    ),
)
_CHOSEN: Final = (_GLANCE, _FIRST_TOKEN, _TRANSFER, _KV, _POOLS, _SCALING, _QUEUE, _ERRORS, _QUALITY, _VERSIONS)
