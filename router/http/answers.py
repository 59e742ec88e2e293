"""What all answers have in common: ids, usage, finish reasons, the `shoal` extension. Knows the public messages."""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from shoal.pb.v1 import shoal_pb2


@dataclass(frozen=True, slots=True)
class Heading:
    """The fields that every chunk of an answer repeats."""

    id: str
    kind: str  # `object`
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            "system_fingerprint": self.fingerprint,
        } | more


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts, each counted once, and of all choices."""

    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _completion_tokens: int = 0

    def add(self, prompt_index: int, complete: shoal_pb2.GenerateComplete, *, shown: bool = True) -> None:
        self._prompts[prompt_index] = (complete.prompt_tokens, complete.cached_tokens)
        self._completion_tokens += complete.completion_tokens if shown else 0

    def body(self) -> dict[str, Any]:
        prompt_tokens = sum(prompt for prompt, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


def extension(complete: shoal_pb2.GenerateComplete) -> dict[str, Any]:
    """What OpenAI's answers have no place for."""
    replaced = {"requested_visibility": complete.requested_visibility, "visibility_reason": complete.visibility_reason}
    images = {"image_tokens": complete.image_tokens} if complete.image_tokens else {}
    return (
        {
            "visibility": complete.visibility,
            "seed": complete.seed,
            "num_retries": complete.num_retries,
            "num_preemptions": complete.num_preemptions,
            "prefill_cached_tokens": complete.prefill_cached_tokens,
            "notices": list(complete.notices),
            "transfer": _plain(complete.transfer),
            "timings": _plain(complete.timings),
            "decode_kv": _plain(complete.decode_kv),
        }
        | (replaced if complete.requested_visibility else {})
        | images
    )


def stop_reason(complete: shoal_pb2.GenerateComplete, eos_token_ids: Collection[int]) -> str | int | None:
    """vLLM's field: the stop string or stop id that ended the answer; null for EOS and everything else."""
    match complete.WhichOneof("matched_stop"):
        case "matched_stop_str":
            return complete.matched_stop_str
        case "matched_token_id" if complete.matched_token_id not in eos_token_ids:
            return complete.matched_token_id
    return None


def _plain(message: Message) -> dict[str, Any]:
    """Fields of a flat message, zeros included; times to a microsecond."""
    values = {one.name: getattr(message, one.name) for one in message.DESCRIPTOR.fields}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
