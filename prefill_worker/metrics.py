"""Every metric of a prefill worker, in one place."""

from shoal.metrics import counter, gauge, histogram

QUEUE_SECONDS = histogram("shoal_prefill_worker_queue_seconds", "From a task's arrival to its first step")
COMPUTE_SECONDS = histogram("shoal_prefill_worker_compute_seconds", "From a task's first step to its last layer")
AFTER_COMPUTE_SECONDS = histogram("shoal_prefill_worker_after_compute_seconds", "From the last layer to the acknowledgement")
STEP_SECONDS = histogram("shoal_prefill_worker_step_seconds", "One step of the continuous batch")
STEP_REQUESTS = histogram(
    "shoal_prefill_worker_step_requests", "Tasks in one step", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
PREFILL_TOKENS = counter("shoal_prefill_worker_run_tokens_total", "Prefill tokens run")
USED_BLOCKS = gauge("shoal_prefill_worker_used_blocks", "KV blocks that tasks own")
GROUP_BLOCKS = gauge(
    "shoal_prefill_worker_group_blocks",
    "Blocks in tasks' tables by group of layers: lower, upper; deep_states. Shared ones count for each",
    ["group"],
)
CACHED_BLOCKS = gauge("shoal_prefill_worker_cached_blocks", "KV blocks that only the prefix cache owns: given up when needed")
EVICTED_BLOCKS = counter("shoal_prefill_worker_evicted_blocks_total", "Cached KV blocks given up for an allocation")
PREFIX_QUERY_TOKENS = counter("shoal_prefill_worker_prefix_query_tokens_total", "Prefill tokens of tasks that got blocks")
PREFIX_HIT_TOKENS = counter("shoal_prefill_worker_prefix_hit_tokens_total", "Of these, found in the prefix cache and not run")
TOTAL_BLOCKS = gauge("shoal_prefill_worker_total_blocks", "KV blocks of the pool")
HOLDING_REQUESTS = gauge("shoal_prefill_worker_holding_requests", "Tasks that hold blocks")
WAITING_REQUESTS = gauge("shoal_prefill_worker_waiting_requests", "Tasks that wait for blocks")
STATE_SECONDS = histogram("shoal_prefill_worker_state_seconds", "How long tasks stood in each state", ["state"])
ENDED_REQUESTS = counter("shoal_prefill_worker_ended_requests_total", "Tasks by how they ended", ["end"])
IMAGE_SECONDS = histogram(
    "shoal_prefill_worker_image_seconds", "One image: decoded, and seen by the vision tower; those seen lately are not seen again"
)
SENT_BYTES = counter("shoal_prefill_worker_sent_bytes_total", "Payload of acknowledged transfers, counted at the channel")
