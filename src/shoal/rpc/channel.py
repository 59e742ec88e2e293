"""Channels to Shoal's servers. Knows message sizes, keepalive and reconnection; knows no service."""

from typing import Final

import grpc

MAX_MESSAGE_BYTES: Final = 256 << 20  # a 128 K-token prompt exceeds gRPC's default of 4 MB

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # retries are ours: bounded, counted and told
    ("grpc.enable_http_proxy", 0),  # an http_proxy variable must not divert calls between our own processes
    ("grpc.use_local_subchannel_pool", 1),  # a channel's back-off is its own
)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, more_options: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.Channel:
    """An asyncio channel to `host:port`. It connects on first use; close it when done."""
    options = (*CHANNEL_OPTIONS, *more_options)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_sync_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, more_options: tuple[tuple[str, str], ...] = ()
) -> grpc.Channel:
    """The same for synchronous callers."""
    options = (*CHANNEL_OPTIONS, *more_options)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)
