"""Python clients of the public gRPC API. Need neither torch nor Ray."""

from shoal.client.aio import AsyncClient
from shoal.client.connection import Retry, tls_credentials
from shoal.client.requests import Sampling
from shoal.client.sync import Client
from shoal.client.types import Chunk, Completion, Image, Message, Score, Timings, ToolCall, Transfer

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "Image",
    "Message",
    "Retry",
    "Sampling",
    "Score",
    "Timings",
    "ToolCall",
    "Transfer",
    "tls_credentials",
]
