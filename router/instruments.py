"""The router's metrics."""

from shoal.metrics import counter, gauge, histogram

REQUESTS = counter("shoal_router_requests_total", "Requests ended, by outcome and policy", ("outcome", "visibility"))
RETRIES = counter("shoal_router_retried_requests_total", "Attempts that were tried again, by reason", ("reason",))
FALLBACKS = counter("shoal_router_fallback_requests_total", "Declared departures from what was asked, by where", ("where",))
RESUMED = counter("shoal_router_resumed_requests_total", "Attempts resumed after tokens had been sent")
PROMPT_TOKENS = counter("shoal_router_prompt_tokens_total", "Prompt tokens of admitted requests")
GENERATED_TOKENS = counter("shoal_router_generated_tokens_total", "Tokens received from decode")
PAYLOAD_BYTES = counter("shoal_router_transfer_payload_bytes_total", "Bytes that crossed from prefill to decode", ("visibility",))
FULL_DEPTH_BYTES = counter(
    "shoal_router_transfer_full_depth_bytes_total", "Bytes that full depth would have shipped instead", ("visibility",)
)
ACTIVE = gauge("shoal_router_active_streams", "Requests being served")
TTFT = histogram("shoal_router_ttft_seconds", "Receipt of the request to its first token", ("visibility",))
TPOT = histogram("shoal_router_tpot_seconds", "Mean time per later token of one request", ("visibility",))
ITL = histogram("shoal_router_itl_seconds", "Gaps between messages of tokens from decode", ("visibility",))
READY_WORKERS = gauge("shoal_router_ready_workers", "Workers that may be chosen", ("pool",))
WATCH_RECONNECTS = counter(
    "shoal_router_reopened_endpoint_streams_total", "Times the list of endpoints had to be asked for again"
)
HTTP_REQUESTS = counter("shoal_router_http_requests_total", "Answers of the HTTP door, by path and status", ("path", "status"))
