"""Every metric of a decode worker, in one place."""

from shoal.metrics import counter, gauge, histogram

QUEUE_SECONDS = histogram("shoal_decode_worker_queue_seconds", "From a request's arrival to its reservation: first part of TTFT")
TRANSFER_SECONDS = histogram(
    "shoal_decode_worker_transfer_seconds", "From the reservation to the last entry: prefill and transfer"
)
FIRST_STEP_SECONDS = histogram(
    "shoal_decode_worker_first_step_seconds",
    "From the last entry, or from the reservation where decode prefills, to the first token",
)
STEP_SECONDS = histogram("shoal_decode_worker_step_seconds", "One step of the continuous batch")
STEP_REQUESTS = histogram(
    "shoal_decode_worker_step_requests", "Requests in one step", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
DECODE_TOKENS = counter("shoal_decode_worker_run_tokens_total", "Decode tokens run at full depth (boundary, replayed, generated)")
PREFILLED_TOKENS = counter("shoal_decode_worker_prefilled_tokens_total", "Prefill tokens run here, without a transfer")
SAMPLED_TOKENS = counter("shoal_decode_worker_sampled_tokens_total", "Tokens sampled")
SCORED_TOKENS = counter("shoal_decode_worker_scored_tokens_total", "Given tokens scored (Score, prompt log-probabilities)")
PROJECTED_TOKENS = counter("shoal_decode_worker_projected_tokens_total", "Prefill tokens projected late")
USED_BLOCKS = gauge("shoal_decode_worker_used_blocks", "KV blocks that requests own")
GROUP_BLOCKS = gauge(
    "shoal_decode_worker_group_blocks",
    "Blocks in requests' tables by group of layers: lower, upper; deep_states. Shared ones count for each",
    ["group"],
)
CACHED_BLOCKS = gauge("shoal_decode_worker_cached_blocks", "KV blocks that only the prefix cache owns: given up when needed")
EVICTED_BLOCKS = counter("shoal_decode_worker_evicted_blocks_total", "Cached KV blocks given up for an allocation")
HIDDEN_BLOCKS = counter(
    "shoal_decode_worker_hidden_blocks_total", "KV blocks that requests gave back as sliding windows hid them"
)
PREFIX_QUERY_TOKENS = counter("shoal_decode_worker_prefix_query_tokens_total", "Prefill tokens of reserved requests")
PREFIX_HIT_TOKENS = counter("shoal_decode_worker_prefix_hit_tokens_total", "Of these, found in the prefix cache")
TOTAL_BLOCKS = gauge("shoal_decode_worker_total_blocks", "KV blocks of the pool")
PREEMPTED_REQUESTS = counter(
    "shoal_decode_worker_preempted_requests_total", "Requests that gave their blocks up to more senior ones"
)
RESERVED_REQUESTS = gauge("shoal_decode_worker_reserved_requests", "Requests that hold blocks")
WAITING_REQUESTS = gauge("shoal_decode_worker_waiting_requests", "Requests that wait for blocks")
STATE_SECONDS = histogram("shoal_decode_worker_state_seconds", "How long requests stood in each state", ["state"])
ENDED_REQUESTS = counter("shoal_decode_worker_ended_requests_total", "Requests by how they ended", ["end"])
RECEIVED_BYTES = counter("shoal_decode_worker_received_bytes_total", "Payload of completed transfers, counted at the channel")
