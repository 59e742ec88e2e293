"""The router's metrics, and how a finished answer is counted. Knows names, units and the public message."""

from collections.abc import Sequence

from shoal.metrics import counter, gauge, histogram
from shoal.pb.v1 import shoal_pb2
from shoal.types import PromptImage

REQUESTS = counter("shoal_router_requests_total", "Requests ended, by outcome and policy", ("outcome", "visibility"))
RETRIES = counter("shoal_router_retried_requests_total", "Attempts that were tried again, by reason", ("reason",))
FALLBACKS = counter("shoal_router_fallback_requests_total", "Declared departures from what was asked, by where", ("where",))
PREFILLS = counter(
    "shoal_router_prefilled_requests_total", "Reservations by where their prefill tokens run, and why", ("at", "reason")
)
PREEMPTED = counter("shoal_router_preempted_requests_total", "Times a request's blocks were needed by others, and it was resumed")
RESUMED = counter("shoal_router_resumed_requests_total", "Attempts resumed after tokens had been sent")
PROMPT_TOKENS = counter("shoal_router_prompt_tokens_total", "Prompt tokens of admitted requests")
IMAGE_REQUESTS = counter("shoal_router_image_requests_total", "Admitted requests with images in their prompts")
IMAGE_BYTES = counter("shoal_router_image_bytes_total", "Files of admitted requests' images")
IMAGE_TOKENS = counter("shoal_router_image_tokens_total", "Prompt tokens of admitted requests that stand for images")
GENERATED_TOKENS = counter("shoal_router_generated_tokens_total", "Tokens received from decode")
PAYLOAD_BYTES = counter("shoal_router_transfer_payload_bytes_total", "Bytes that crossed from prefill to decode", ("visibility",))
FULL_DEPTH_BYTES = counter(
    "shoal_router_transfer_full_depth_bytes_total", "Bytes that full depth would have shipped instead", ("visibility",)
)
SAVED_BYTES = counter("shoal_router_transfer_saved_bytes_total", "Full depth's bytes less those that crossed", ("visibility",))
ACTIVE = gauge("shoal_router_active_streams", "Requests being served")
TTFT = histogram("shoal_router_ttft_seconds", "Receipt of the request to its first token", ("visibility",))
TPOT = histogram("shoal_router_tpot_seconds", "Mean time per later token of one request", ("visibility",))
ITL = histogram("shoal_router_itl_seconds", "Gaps between messages of tokens from decode", ("visibility",))
RESERVE_SECONDS = histogram(
    "shoal_router_queue_seconds", "From tokenising to decode's reservation: queues of router and decode", ("visibility",)
)
PREFILL_SECONDS = histogram("shoal_router_prefill_seconds", "Prefill's queue and compute of one request", ("visibility",))
ATTEMPT_STATE_SECONDS = histogram("shoal_router_attempt_state_seconds", "How long attempts stood in each state", ("state",))
EXPOSED_TRANSFER_SECONDS = histogram(
    "shoal_router_exposed_transfer_seconds", "What the transfer adds to TTFT after the last layer was computed", ("visibility",)
)
READY_WORKERS = gauge("shoal_router_ready_workers", "Workers that may be chosen", ("pool",))
SESSIONS = gauge("shoal_router_session_streams", "Workers whose calls share one stream", ("pool",))
LOST_SESSIONS = counter("shoal_router_lost_session_streams_total", "Sessions that broke, with the calls on them", ("pool",))
PLAIN_CALLS = counter(
    "shoal_router_plain_requests_total",
    "Calls to workers that each took a stream of their own: size, not_open, unsupported (an older worker)",
    ("pool", "reason"),
)
BREAKER_STATE = gauge(
    "shoal_router_breaker_state", "0 closed, 0.5 half open (one request tries), 1 open: none is sent", ("worker", "leg")
)
BREAKER_TRANSITIONS = counter(
    "shoal_router_breaker_transitions_total", "Changes of breakers, by the state they came to", ("worker", "leg", "state")
)
REFUSED = counter(
    "shoal_router_refused_requests_total", "Requests refused early, by the bound that their wait would pass", ("bound",)
)
PREDICTED_WAIT = histogram("shoal_router_predicted_wait_seconds", "Predicted wait for a start, of requests that were let in")
WATCH_RECONNECTS = counter(
    "shoal_router_reopened_endpoint_streams_total", "Times the list of endpoints had to be asked for again"
)
HTTP_REQUESTS = counter("shoal_router_http_requests_total", "Answers of the HTTP door, by path and status", ("path", "status"))
HTTP_CLOSED = counter(
    "shoal_router_closed_connections_total",
    "Connections closed before they brought a request: late_headers, long_headers, too_many",
    ("reason",),
)
TENANT_REQUESTS = counter("shoal_router_tenant_requests_total", "Requests begun within their tenant's limits", ("tenant",))
LIMITED = counter("shoal_router_limited_requests_total", "Requests beyond their tenant's limits", ("tenant", "limit"))
UNAUTHENTICATED = counter("shoal_router_unauthenticated_requests_total", "Calls without a valid token, by door", ("door",))
SHADOWED = counter(
    "shoal_router_shadow_requests_total",
    "Requests chosen for a replay at full depth, by what became of it: measured, busy, no_memory, gave_way, failed, stopped",
    ("visibility", "outcome"),
)
SHADOW_HELD = gauge("shoal_router_shadow_held_requests", "Finished requests whose tokens are held to be replayed")
SHADOW_TOKENS = counter("shoal_router_shadow_tokens_total", "Answer tokens compared with full depth", ("visibility",))
SHADOW_AGREEING = counter(
    "shoal_router_shadow_agreeing_tokens_total", "Of these, where both depths' most likely token is the same", ("visibility",)
)
SHADOW_KL = counter(
    "shoal_router_shadow_kl_nats_total", "KL(full, visibility) summed over the compared tokens, a lower bound", ("visibility",)
)
QUALITY_AGREEMENT = gauge(
    "shoal_router_quality_agreement_ratio", "Share of agreeing tokens in the gate's sliding window", ("visibility",)
)
QUALITY_KL = gauge("shoal_router_quality_kl_nats", "Mean KL per token in the gate's window, a lower bound", ("visibility",))
QUALITY_SAMPLES = gauge("shoal_router_quality_window_requests", "Replayed requests in the gate's sliding window", ("visibility",))
QUALITY_STATE = gauge(
    "shoal_router_quality_gate_state", "0 served as asked, 1 outside the band: served at full depth instead", ("visibility",)
)
QUALITY_TRANSITIONS = counter(
    "shoal_router_quality_gate_transitions_total",
    "Changes of the gate, by the state it came to (full, served) and the bound that was left",
    ("visibility", "state", "bound"),
)
QUALITY_REPLACED = counter(
    "shoal_router_quality_replaced_requests_total",
    "Requests the gate served at full depth, by what they asked",
    ("visibility",),
)


def count_images(images: Sequence[PromptImage]) -> None:
    """Those of one request, which has some."""
    IMAGE_REQUESTS.inc()
    IMAGE_BYTES.inc(sum(len(image.data) for image in images))
    IMAGE_TOKENS.inc(sum(image.span.num_tokens for image in images))


def count_transfer(policy: str, transfer: shoal_pb2.TransferStats) -> None:
    """What crossed for one request, and what full depth would have shipped."""
    PAYLOAD_BYTES.labels(policy).inc(transfer.payload_bytes)
    FULL_DEPTH_BYTES.labels(policy).inc(transfer.full_depth_bytes)
    SAVED_BYTES.labels(policy).inc(max(0, transfer.full_depth_bytes - transfer.payload_bytes))


def observe_parts(policy: str, complete: shoal_pb2.GenerateComplete) -> None:
    """Parts of TTFT, of a request whose KV was transferred."""
    if complete.transfer.num_entries:
        for histogram_of, ms in (
            (RESERVE_SECONDS, complete.timings.reserve_ms),
            (PREFILL_SECONDS, complete.timings.prefill_ms),
            (EXPOSED_TRANSFER_SECONDS, complete.timings.transfer_ms),
        ):
            histogram_of.labels(policy).observe(ms / 1e3)
