"""The table of `shoal transfer-cost`: one row per visibility, prompt length and link. Knows what is compared; prints nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.simulator.hardware import Link
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.request_cost import request_alone
from shoal.simulator.transfer_cost import Wire
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One handoff, alone on its link."""

    visibility: str
    link: str
    prompt_tokens: int
    cached_tokens: int
    wire_bytes: int
    saved_share: float  # of `full`'s bytes
    prefill_ms: float
    serial_ms: float  # everything sent after prefill
    exposed_ms: float  # layers sent as they finish
    ttft_ms: float
    decode_kv_bytes: int
    link_share: float  # busy share of the link: of the given rate, else of one prefill worker that never idles


def default_visibilities(num_layers: int) -> list[Visibility]:
    """`full`; `speed` at 1/2, 5/8, 3/4 and 7/8 of the layers, as in its paper; `pop` and late `pop` without the upper third."""
    depths = sorted({max(1, num_layers * eighth // 8) for eighth in (4, 5, 6, 7)})
    shallow = max(1, num_layers - num_layers // 3)
    speed = [Visibility(VisibilityKind.SPEED, depth, anchor_tokens=1) for depth in depths]
    pop = [Visibility(VisibilityKind.POP, shallow, late=late) for late in (False, True)]
    return [Visibility(), *speed, *pop]


def transfer_rows(
    model: ModelSpec,
    visibilities: Iterable[Visibility],
    links: Sequence[Link],
    prompts: Sequence[int],
    machine: Machine,
    *,
    num_cached: int = 0,
    chunk_tokens: int | None = None,
    rate: float | None = None,
    num_nics: int | None = None,
) -> list[TransferRow]:
    """Every combination, prompts outermost. Raises InvalidRequest for K outside 1…L, InvalidConfig for what cannot be."""
    machine.check_model(model)
    num_layers, resolved = model.shape.num_layers, []
    for visibility in visibilities:
        resolved.append((str(visibility), visibility.resolve(num_layers)))
    rows = []
    for prompt in prompts:
        if prompt > model.shape.max_context:
            raise InvalidConfig(f"a prompt of {prompt} tokens exceeds {model.name}'s context of {model.shape.max_context}")
        if not 0 <= num_cached < prompt:
            raise InvalidConfig(f"{num_cached} cached tokens of a prompt of {prompt} make no sense; cache less than the prompt")
        for link in links:
            wire = Wire.of(link, machine, num_nics)
            alone = [
                (
                    text,
                    request_alone(
                        model, visibility, prompt, machine, machine, wire, num_cached=num_cached, chunk_tokens=chunk_tokens
                    ),
                )
                for text, visibility in [("full", Visibility().resolve(num_layers)), *resolved]
            ]
            full_bytes = alone[0][1].handoff.num_bytes
            for text, request in alone[1:]:
                handoff = request.handoff
                busy = handoff.num_bytes / wire.bytes_per_s
                rows.append(
                    TransferRow(
                        visibility=text,
                        link=link.name,
                        prompt_tokens=prompt,
                        cached_tokens=num_cached,
                        wire_bytes=round(handoff.num_bytes),
                        saved_share=1 - handoff.num_bytes / full_bytes if full_bytes else 0.0,
                        prefill_ms=1e3 * handoff.prefill_s,
                        serial_ms=1e3 * handoff.serial_s,
                        exposed_ms=1e3 * handoff.exposed_s,
                        ttft_ms=1e3 * request.ttft_s,
                        decode_kv_bytes=round(request.kv_bytes),
                        link_share=busy * rate if rate is not None else busy / handoff.prefill_s if busy else 0.0,
                    )
                )
    return rows
