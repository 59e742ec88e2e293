"""What the handoff counts. Knows names and units only."""

from shoal.metrics import counter, gauge, histogram

TRANSFERS = counter("shoal_transfer_finished_transfers_total", "Transfers acknowledged, by end (sent, received).", ["end"])
FAILURES = counter(
    "shoal_transfer_failed_transfers_total", "Transfers that ended without an Ack, by end and error.", ["end", "reason"]
)
REJECTS = counter("shoal_transfer_rejected_transfers_total", "Opens that decode refused, by error.", ["reason"])
PAYLOAD = counter(
    "shoal_transfer_payload_bytes_total", "Bytes of KV and deep states counted at the pair channel, by end.", ["end"]
)
HEADERS = counter("shoal_transfer_control_bytes_total", "Bytes of control messages, both directions, by end.", ["end"])
EXPIRED = counter("shoal_transfer_expired_transfers_total", "Reservations that no prefill worker opened within their lease.")
SKIPPED = counter("shoal_transfer_skipped_bytes_total", "Bytes that were ready at prefill and no longer wanted by decode.")
SECONDS = histogram("shoal_transfer_duration_seconds", "From Open to Ack (sent), from reservation to Ack (received).", ["end"])
PAIRS = gauge("shoal_transfer_active_pairs", "Pairs with a control stream, by end.", ["end"])
PAIR_FAILURES = counter("shoal_transfer_failed_pairs_total", "Pairs closed by an error, by end and error.", ["end", "reason"])
STAGING = gauge("shoal_transfer_staging_bytes", "Staging buffers in use, by end.", ["end"])
QUARANTINE = gauge(
    "shoal_transfer_quarantined_bytes", "Staging in use whose attempt has ended before its message returned.", ["end"]
)
