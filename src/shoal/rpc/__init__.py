"""gRPC plumbing: server and channel factories, the error table, deadlines, health."""

from shoal.rpc.address import Address
from shoal.rpc.channel import open_channel, open_sync_channel
from shoal.rpc.cluster import ClusterLink
from shoal.rpc.deadlines import time_remaining_s
from shoal.rpc.metrics_http import serve_metrics
from shoal.rpc.server import RpcServer
from shoal.rpc.session_client import Session, SessionCall
from shoal.rpc.status import error_from_rpc, error_from_status, to_status

__all__ = [
    "Address",
    "ClusterLink",
    "RpcServer",
    "Session",
    "SessionCall",
    "error_from_rpc",
    "error_from_status",
    "open_channel",
    "open_sync_channel",
    "serve_metrics",
    "time_remaining_s",
    "to_status",
]
