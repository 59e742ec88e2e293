"""What is asked of a prefill worker, and whether it fits what decode has reserved. Knows limits; knows no load."""

from dataclasses import dataclass

from shoal.config.worker import WorkerConfig
from shoal.errors import InvalidRequest, Mismatch
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.wire import MAX_ID_CHARACTERS
from shoal.model_files import VisionConfig, check_images
from shoal.pb.internal.v1 import worker_pb2
from shoal.placement.plan import TransferPlan, make_plan
from shoal.placement.prefix_keys import cache_key
from shoal.placement.tables import KvLayout
from shoal.rpc.image_spans import images_from_pb
from shoal.types import USUAL_TURN, Fingerprint, ModelShape, PromptImage, Turn


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    """One attempt: the prefill tokens, where they go, and what crosses."""

    layout: KvLayout  # with the resolved visibility, N, P and α
    token_ids: tuple[int, ...]  # x_0 … x_{P−1}
    plan: TransferPlan
    handle: Handle
    decode_address: str
    decode_worker_id: str
    decode_epoch: int
    turn: Turn = USUAL_TURN
    cache_salt: str = ""  # whose cached prefixes it may use: `cache_key` of tenant and salt
    is_background: bool = False  # nobody waits for it: small pieces, and no prefix of it is kept
    images: tuple[PromptImage, ...] = ()  # all within the prefill tokens, in order

    @property
    def num_due_anchors(self) -> int:
        """Anchors whose states decode lacks."""
        num_anchors = self.layout.split.num_anchor_tokens if self.layout.upper_layers else 0
        return max(0, num_anchors - self.handle.num_cached_tokens)

    @property
    def attempt_id(self) -> str:
        return self.handle.attempt_id


def read_spec(
    message: worker_pb2.PrefillRequest,
    config: WorkerConfig,
    shape: ModelShape,
    fingerprint: Fingerprint,
    vision: VisionConfig | None = None,
) -> PrefillSpec:
    """Translate and check a task. Raises InvalidRequest, Unsupported for images where the model sees none, or Mismatch when this
    side's plan is not the reserved one.
    """
    if not 0 < len(message.attempt_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequest(f"an attempt id has 1 … {MAX_ID_CHARACTERS} characters; send the one that decode reserved")
    visibility = config.accept_visibility(message.visibility, shape.num_layers)
    num_prompt, num_cached, limit = message.num_prompt_tokens, message.cached_tokens, config.max_context(shape)
    if num_prompt > limit:
        raise InvalidRequest(f"a prompt of {num_prompt} tokens exceeds the context of {limit}; shorten it")
    layout = KvLayout.of(shape.num_layers, visibility, num_prompt)
    token_ids = tuple(message.prompt_ids)
    if not token_ids or len(token_ids) != layout.split.num_prefill_tokens or num_cached >= len(token_ids):
        raise InvalidRequest(
            f"{len(token_ids)} tokens given with {num_cached} cached, but a prompt of {num_prompt} under {visibility} has"
            f" {layout.split.num_prefill_tokens} prefill tokens; prefill takes exactly those, and only when some are not cached"
        )
    if max(token_ids) >= shape.vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} lies outside the vocabulary of {shape.vocab_size}")
    images = images_from_pb(message.images)
    check_images(
        vision,
        token_ids,
        [image.span for image in images],
        num_prefill_tokens=layout.split.num_prefill_tokens,
        num_anchor_tokens=layout.split.num_anchor_tokens,
        prefill_layers=len(layout.lower_layers),
    )
    plan = make_plan(
        shape,
        config.dtype,
        visibility,
        num_prompt,
        num_cached,
        max_entry_bytes=config.transfer.max_entry_bytes,
        max_entry_tokens=config.transfer.max_entry_tokens,
    )
    if plan.digest != message.plan_digest:
        raise Mismatch(
            f"decode reserved plan {message.plan_digest}, prefill computes {plan.digest} for {visibility}, N = {num_prompt};"
            " start both pools with the same model, dtype and transfer settings"
        )
    handle = Handle(message.attempt_id, fingerprint, str(visibility), num_prompt, num_cached, plan.digest)
    turn, salt = Turn.parse(message.priority, message.tenant), cache_key(message.tenant, message.cache_salt)
    target = message.decode_address, message.decode_worker_id, message.decode_epoch
    return PrefillSpec(layout, token_ids, plan, handle, *target, turn, salt, message.background, images)
