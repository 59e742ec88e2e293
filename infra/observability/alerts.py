"""Which alerts there are, and their file in Prometheus' format. Each links to what helps in docs/troubleshooting.md."""

from dataclasses import dataclass
from typing import Any, Final

import yaml

RUNBOOK: Final = "docs/troubleshooting.md"
TTFT_SLO_S, TPOT_SLO_S = 2.5, 0.25  # bounds of buckets; change them here for an SLO of your own

_REQUESTS, _FAILED = "shoal_router_requests_total", "shoal_transfer_failed_transfers_total"
_FAULTS = '{reason!="Cancelled"}'  # without those of clients that left
_OURS, _LATE = '{outcome=~"unavailable|internal|unknown"}', '{outcome="deadline_exceeded"}'


@dataclass(frozen=True, slots=True)
class Alert:
    """`anchor` is a heading of the runbook page. Severity: page (users notice now), ticket (somebody should look today)."""

    name: str
    expression: str
    hold: str  # how long the expression must be true
    severity: str
    summary: str
    anchor: str


def _sum(name: str, window: str = "5m", matchers: str = "") -> str:
    return f"sum(rate({name}{matchers}[{window}]))"


def _p(share: float, name: str, window: str = "10m") -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({name}_bucket[{window}])))"


def _share(part: str, whole: str, window: str = "5m", matchers: str = "") -> str:
    return f"{_sum(part, window, matchers)} / {_sum(whole, window)}"


def _full(pool: str) -> str:
    used, total, waiting = (
        f"sum by (job) (shoal_{pool}_worker_{what})" for what in ("used_blocks", "total_blocks", "waiting_requests")
    )
    return f"{used} / {total} > 0.95 and {waiting} > 0"


ALERTS: Final = (
    Alert(
        "ShoalProcessDown",
        "up == 0 and on (job, instance) last_over_time(shoal_build_info[1h])",
        "2m",
        "ticket",
        "{{ $labels.instance }} exported Shoal's metrics within the last hour and does not answer any more",
        "a-process-is-gone",
    ),
    Alert(
        "ShoalPoolEmpty",
        "max by (pool) (shoal_router_ready_workers) == 0 and max by (pool) (shoal_controller_desired_workers) > 0",
        "1m",
        "page",
        "No {{ $labels.pool }} worker may be chosen by any router: requests end UNAVAILABLE",
        "requests-end-unavailable",
    ),
    Alert(
        "ShoalWorkersMissing",
        'max by (pool) (shoal_controller_desired_workers) - sum by (pool) (shoal_controller_workers{state="ready"}) > 0',
        "15m",
        "ticket",
        "{{ $value }} {{ $labels.pool }} workers are wanted and not ready",
        "a-worker-does-not-become-ready",
    ),
    Alert(
        "ShoalControllerSilent",
        "absent(shoal_controller_desired_workers) and on () count(shoal_router_ready_workers) > 0",
        "5m",
        "page",
        "Routers run and no controller exports metrics: what dies now is not replaced",
        "the-controller-is-away",
    ),
    Alert(
        "ShoalWorkersRestart",
        "sum by (pool) (increase(shoal_controller_restarted_workers_total[30m])) > 3",
        "0m",
        "ticket",
        "{{ $labels.pool }} workers were started again {{ $value | humanize }} times within half an hour",
        "workers-are-started-again-and-again",
    ),
    Alert(
        "ShoalWorkerStalled",
        "max by (instance) (shoal_engine_stalled_state) == 1",
        "0m",
        "page",
        "On {{ $labels.instance }} requests should move and none does",
        "a-worker-stands-still",
    ),
    Alert(
        "ShoalRequestsFail",
        f"{_share(_REQUESTS, _REQUESTS, matchers=_OURS)} > 0.02",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of requests end UNAVAILABLE or INTERNAL",
        "requests-end-unavailable",
    ),
    Alert(
        "ShoalRequestsRefused",
        f"{_share('shoal_router_refused_requests_total', _REQUESTS)} > 0.05",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of requests are refused: they would wait too long",
        "requests-are-refused-resource_exhausted",
    ),
    Alert(
        "ShoalDeadlinesPass",
        f"{_share(_REQUESTS, _REQUESTS, matchers=_LATE)} > 0.05",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of requests reach their deadline",
        "the-first-token-is-late",
    ),
    Alert(
        "ShoalFirstTokenLate",
        f"{_p(0.95, 'shoal_router_ttft_seconds')} > {TTFT_SLO_S}",
        "10m",
        "ticket",
        f"p95 of the time to first token is {{{{ $value | humanizeDuration }}}}, the objective {TTFT_SLO_S:g} s",
        "the-first-token-is-late",
    ),
    Alert(
        "ShoalTokensSlow",
        f"{_p(0.95, 'shoal_router_tpot_seconds')} > {TPOT_SLO_S}",
        "10m",
        "ticket",
        f"p95 of the time per token is {{{{ $value | humanizeDuration }}}}, the objective {TPOT_SLO_S:g} s",
        "tokens-come-slowly",
    ),
    Alert(
        "ShoalTransferExposed",
        f"{_share('shoal_router_exposed_transfer_seconds_sum', 'shoal_router_ttft_seconds_sum', '10m')} > 0.3",
        "15m",
        "ticket",
        "{{ $value | humanizePercentage }} of the time to first token is transfer that nothing hides",
        "the-transfer-is-exposed",
    ),
    Alert(
        "ShoalTransfersFail",
        f"{_sum(_FAILED, matchers=_FAULTS)} / ({_sum(_FAILED)} + {_sum('shoal_transfer_finished_transfers_total')}) > 0.02",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of transfers end without an acknowledgement",
        "transfers-fail",
    ),
    Alert(
        "ShoalLeasesExpire",
        f"{_sum('shoal_transfer_expired_transfers_total', '15m')} > 0.01",
        "15m",
        "ticket",
        "Reservations on decode are opened by no prefill worker within their lease",
        "transfers-fail",
    ),
    Alert(
        "ShoalQuarantineStays",
        "min_over_time(shoal_transfer_quarantined_bytes[10m]) > 0",
        "5m",
        "ticket",
        "{{ $labels.instance }} has kept staging in quarantine for ten minutes: a peer neither finishes nor is found dead",
        "staging-stays-in-quarantine",
    ),
    Alert(
        "ShoalPairsFail",
        "sum by (reason) (increase(shoal_transfer_failed_pairs_total[15m])) > 3",
        "0m",
        "ticket",
        "{{ $value | humanize }} pairs were closed by {{ $labels.reason }} within a quarter of an hour",
        "transfers-fail",
    ),
    Alert(
        "ShoalBreakerOpen",
        "max by (worker, leg) (shoal_router_breaker_state) == 1",
        "2m",
        "ticket",
        "A router sends no {{ $labels.leg }} requests to {{ $labels.worker }}: they failed there",
        "a-breaker-is-open",
    ),
    Alert(
        "ShoalDecodeFull",
        _full("decode"),
        "10m",
        "ticket",
        "Decode has no KV blocks left and requests wait for some",
        "requests-wait-for-kv-blocks",
    ),
    Alert(
        "ShoalPrefillFull",
        _full("prefill"),
        "10m",
        "ticket",
        "Prefill has no KV blocks left and tasks wait for some",
        "requests-wait-for-kv-blocks",
    ),
    Alert(
        "ShoalPreemptionsFrequent",
        f"{_share('shoal_decode_worker_preempted_requests_total', _REQUESTS)} > 0.1",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of requests give their blocks up and are replayed",
        "requests-wait-for-kv-blocks",
    ),
    Alert(
        "ShoalFallsBack",
        "sum by (where) (rate(shoal_router_fallback_requests_total[10m])) > 0.1",
        "10m",
        "ticket",
        "Requests are served otherwise than asked: {{ $labels.where }}",
        "answers-carry-notices",
    ),
    Alert(
        "ShoalScalingFails",
        "sum by (pool, reason) (increase(shoal_controller_scaling_failed_transitions_total[15m])) > 2",
        "0m",
        "ticket",
        "The {{ $labels.pool }} pool could not be brought to its size: {{ $labels.reason }}",
        "scaling-does-not-follow",
    ),
    Alert(
        "ShoalScalingAtItsBound",
        "max by (pool) (shoal_controller_needed_workers) > on (pool) max by (pool) (shoal_controller_desired_workers)",
        "15m",
        "ticket",
        "The {{ $labels.pool }} pool needs {{ $value | humanize }} workers, more than it may have",
        "scaling-does-not-follow",
    ),
    Alert(
        "ShoalQualityLeftBand",
        "max by (visibility) (shoal_router_quality_gate_state) == 1",
        "0m",
        "ticket",
        "{{ $labels.visibility }} is served at full depth: it agreed with full depth less than its band allows",
        "quality-left-its-band",
    ),
    Alert(
        "ShoalVersionsDiffer",
        "count(count by (version) (shoal_build_info)) > 1",
        "1h",
        "ticket",
        "Processes of {{ $value }} versions have run side by side for an hour",
        "versions-differ",
    ),
    Alert(
        "ShoalSlowBackEnd",
        'count by (backend, reason) (shoal_engine_backend_info{backend="torch"}) > 0',
        "15m",
        "ticket",
        "{{ $value }} workers compute with {{ $labels.backend }}: {{ $labels.reason }}",
        "tokens-come-slowly",
    ),
    Alert(
        "ShoalStrangersCall",
        "sum by (door) (rate(shoal_router_unauthenticated_requests_total[10m])) > 1",
        "10m",
        "ticket",
        "{{ $value | humanize }} calls a second come without a valid token at {{ $labels.door }}",
        "calls-are-unauthenticated",
    ),
)


def rules(runbooks: str = "") -> str:
    """The file of rules. `runbooks`: where docs/ is published, with its last slash; "": relative links."""
    made = [_rule(alert, runbooks) for alert in ALERTS]
    head = "# Made by `python -m infra.observability`: change infra/observability/alerts.py, not this file.\n"
    whole = {"groups": [{"name": "shoal", "rules": made}]}
    return head + yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=10_000)


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": f"{runbooks}{RUNBOOK}#{alert.anchor}"},
    }
