"""The handoff between a prefill and a decode worker: the only room that knows both ends."""

from shoal.kv_transfer.client import TransferClient
from shoal.kv_transfer.dial import DecodeTarget
from shoal.kv_transfer.faults import Faults
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.incoming import IncomingTransfer, KvSink, ReceivedReport
from shoal.kv_transfer.outgoing import KvSource, OutgoingTransfer, SentReport
from shoal.kv_transfer.server import TransferServer

__all__ = [
    "DecodeTarget",
    "Faults",
    "Handle",
    "IncomingTransfer",
    "KvSink",
    "KvSource",
    "OutgoingTransfer",
    "ReceivedReport",
    "SentReport",
    "TransferClient",
    "TransferServer",
]
