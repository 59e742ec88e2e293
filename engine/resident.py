"""A model in a worker's memory: weights, KV pool and what the worker says about them. Knows no requests and no transport."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.config.transfer import SHARED_MEMORY
from shoal.config.worker import WorkerConfig
from shoal.engine.decoder import Decoder, HeldLayers, LoadReport
from shoal.engine.kv_pool import KvPool, block_bytes
from shoal.engine.shared_memory import SharedMemory
from shoal.engine.vision import VisionEncoder
from shoal.engine.vision.tower import VisionTower, missing_library
from shoal.errors import InvalidConfig
from shoal.model_files import ModelFiles, open_model
from shoal.placement.blocks import BlockPool
from shoal.types import Fingerprint, ModelShape

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resident:
    """Everything that is loaded once. `report` says what was read from disk."""

    model: ModelFiles
    decoder: Decoder
    pool: KvPool
    blocks: BlockPool
    report: LoadReport

    @property
    def shape(self) -> ModelShape:
        return self.model.config.shape

    @property
    def num_layers_held(self) -> int:
        """Layers of which any weight was read."""
        return len(self.report.layers_opened)


def open_for(config: WorkerConfig) -> ModelFiles:
    """Open the model and check that the configuration fits it, before any weight is read. Blocking, but short.

    Raises InvalidConfig when the model is unusable, an allowed depth exceeds it or the pool cannot hold one request, and Mismatch
    when the adapter is for another model or was tuned under another visibility than those allowed.
    """
    model = open_model(config.model, config.adapter)
    policies = config.allowed_policies(model.config.shape.num_layers)
    if model.adapter is not None and not config.adapter_any_visibility:
        model.adapter.check_visibilities(policies, model.config.shape.num_layers)
    config.pool_blocks(model.config.shape)
    config.check_entries(model.config.shape)
    return model


def shared_memory_for(model: ModelFiles, config: WorkerConfig) -> SharedMemory | None:
    """Where the KV pool of a prefill worker lies that decode workers read; None with any other transfer. Blocking.

    Raises InvalidConfig where there is no such memory, or the pool is to lie on a GPU.
    """
    if config.transfer.backend != SHARED_MEMORY:
        return None
    if _device(config.device).type != "cpu":
        raise InvalidConfig("transfer.backend 'shared-memory' is for KV in the CPU's memory; set device 'cpu' or another backend")
    shape = model.config.shape
    memory = SharedMemory(config.pool_blocks(shape) * block_bytes(shape, config.block_size, config.dtype))
    if not memory.has_large_pages:
        _log.info(
            "shared KV lies in small pages, which slows attention over it: the kernel has no large ones (Linux 6.1 or later)"
        )
    return memory


def load_resident(
    model: ModelFiles,
    config: WorkerConfig,
    held: HeldLayers,
    progress: Callable[[int, int], None] | None = None,
    memory: SharedMemory | None = None,
) -> Resident:
    """Load the held layers and make the KV pool. Blocking. `progress` is told (done, total) from this thread."""
    num_blocks, device = config.pool_blocks(model.config.shape), _device(config.device)
    decoder, report = Decoder.load(model, dtype=config.dtype, held=held, backend=config.backend, device=device, progress=progress)
    data = memory.data if memory is not None else None
    pool = KvPool(model.config.shape, num_blocks, config.block_size, config.dtype, device, data)
    return Resident(model, decoder, pool, BlockPool(num_blocks), report)


def load_vision(
    model: ModelFiles, config: WorkerConfig, seen: Callable[[float], object] = lambda seconds: None
) -> VisionEncoder | None:
    """What sees images for a prefill worker; None for a model of text, or where libraries are missing (logged). Blocking."""
    if model.vision is None or not config.sees_images:
        return None
    if reason := missing_library():
        _log.warning("images are not served, text is: %s", reason)
        return None
    return VisionEncoder(VisionTower.load(model, config.dtype, _device(config.device)), config.num_threads, seen=seen)


def _device(name: str) -> torch.device:
    """Raises InvalidConfig when "cuda" is asked for and the process sees no GPU."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise InvalidConfig("device 'cuda': this process sees no GPU, or torch is a CPU build; use 'auto' or 'cpu'")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def fingerprint_of(model: ModelFiles, config: WorkerConfig) -> Fingerprint:
    """What another worker must agree on before KV may cross."""
    shape = model.config.shape
    return Fingerprint(
        revision=model.revision,
        adapter=model.adapter_digest,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=config.dtype,
        block_size=config.block_size,
        rope=model.config.rope_text,
        max_entry_bytes=config.transfer.max_entry_bytes,
        max_entry_tokens=config.transfer.max_entry_tokens,
    )
