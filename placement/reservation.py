"""How much of a worker's KV pool a request needs, before any work. Knows slots, blocks, bytes; knows no pool (design §4, §5.1).

One block is `block_size` tokens × one layer's K and V, so a table of s slots over n layers takes n · ⌈s / block_size⌉ blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.errors import InvalidRequest
from shoal.placement.arithmetic import deep_state_bytes
from shoal.placement.tables import KvLayout, num_fork_blocks
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class ReservationSize:
    """Room for one request on one worker."""

    num_lower_slots: int  # in each of the lower K layers
    num_upper_slots: int  # in each of the upper L − K layers
    num_blocks: int  # both tables together, forks included
    num_deep_state_bytes: int  # hidden states kept beside the pool until they are shipped, run or projected
    forks: tuple[tuple[int, int], ...] = ()  # (lower, upper) slots of each further answer; they share the prompt's whole blocks


def decode_reservation(
    shape: ModelShape,
    dtype: DType,
    block_size: int,
    visibility: Visibility,
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    num_replay_tokens: int = 0,
    num_cached_tokens: int = 0,
    further_answers: Sequence[int] = (),
) -> ReservationSize:
    """What a decode worker without preemption reserves: r = replayed tokens + max_tokens − 1 beyond the prompt.

    `lower` N + r; `upper` α + (N − P) + r (`speed`) or N + r (`pop`). `max_tokens` are still to be sampled, after those
    replayed; the last one is never run. A cached prefix is counted too: sharing blocks needs no new ones, but their owner
    may let go of them. The visibility is resolved. `further_answers`: for n > 1, the tokens (replayed + max_tokens) of each
    answer after the first.
    """
    layout = KvLayout.of(shape.num_layers, visibility, num_prompt_tokens)
    num_slots = num_prompt_tokens + num_replay_tokens + max_tokens - 1
    states = deep_state_bytes(shape, dtype, visibility, num_prompt_tokens, num_cached_tokens)
    slots = [num_prompt_tokens + num_tokens - 1 for num_tokens in further_answers]
    forks = tuple((own, layout.num_upper_slots(own)) for own in slots)
    size = _size(layout, block_size, num_slots, layout.num_upper_slots(num_slots), states)
    num_fork = sum(sum(num_fork_blocks(layout, block_size, *fork)) for fork in forks)
    return replace(size, num_blocks=size.num_blocks + num_fork, forks=forks)


def prefill_reservation(
    shape: ModelShape,
    dtype: DType,
    block_size: int,
    visibility: Visibility,
    num_prompt_tokens: int,
    *,
    num_cached_tokens: int = 0,
) -> ReservationSize:
    """What a prefill worker reserves for P prefill tokens of a prompt of N.

    `lower` P; `upper` P for plain `pop`, none for `speed` and late `pop`, whose deep states are kept until they are sent.
    """
    layout = KvLayout.of(shape.num_layers, visibility, num_prompt_tokens)
    num_slots = layout.split.num_prefill_tokens
    makes_upper_kv = visibility.kind is VisibilityKind.POP and not visibility.late
    states = deep_state_bytes(shape, dtype, visibility, num_prompt_tokens, num_cached_tokens)
    return _size(layout, block_size, num_slots, num_slots if makes_upper_kv else 0, states)


def largest_max_tokens(
    shape: ModelShape,
    block_size: int,
    visibility: Visibility,
    num_prompt_tokens: int,
    num_pool_blocks: int,
    *,
    num_replay_tokens: int = 0,
    num_answers: int = 1,
) -> int:
    """The largest max_tokens whose decode reservation fits a whole pool of `num_pool_blocks`; 0 when not even 1 does.

    With several answers each replays `num_replay_tokens` and may sample as many.
    """

    def fits(max_tokens: int) -> bool:
        size = decode_reservation(
            shape,
            DType.FLOAT32,
            block_size,
            visibility,
            num_prompt_tokens,
            max_tokens,
            num_replay_tokens=num_replay_tokens,
            further_answers=[num_replay_tokens + max_tokens] * (num_answers - 1),
        )
        return size.num_blocks <= num_pool_blocks

    low, high = 0, num_pool_blocks * block_size + 1  # every run token takes a slot of at least one block
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits_ever(size: ReservationSize, num_pool_blocks: int, max_deep_state_bytes: int | None = None) -> bool:
    """Whether an idle worker with so many blocks (and bytes for deep states; None = not limited) can hold the request."""
    too_many_states = max_deep_state_bytes is not None and size.num_deep_state_bytes > max_deep_state_bytes
    return size.num_blocks <= num_pool_blocks and not too_many_states


def check_fits_ever(
    size: ReservationSize,
    num_pool_blocks: int,
    *,
    max_deep_state_bytes: int | None = None,
    max_tokens_that_fit: int | None = None,
) -> None:
    """Raise InvalidRequest, with the numbers and what to change, when waiting can never help. Call it before any work.

    `max_tokens_that_fit` (see `largest_max_tokens`) is quoted as advice where it is more than 0.
    """
    if fits_ever(size, num_pool_blocks, max_deep_state_bytes):
        return
    if size.num_blocks > num_pool_blocks:
        advice = "shorten the prompt"
        if max_tokens_that_fit:
            advice += f" or set max_tokens to at most {max_tokens_that_fit}"
        if size.forks:
            advice += ", ask for fewer answers (n)"
        raise InvalidRequest(
            f"the request needs {size.num_blocks} KV blocks ({size.num_lower_slots} slots in each lower layer, "
            f"{size.num_upper_slots} in each upper one) and the worker has {num_pool_blocks} in all; {advice}, "
            f"or give the worker a larger KV pool"
        )
    raise InvalidRequest(
        f"the request keeps {size.num_deep_state_bytes} bytes of hidden states and the worker allows "
        f"{max_deep_state_bytes}; shorten the prompt or use pop without late"
    )


def _size(layout: KvLayout, block_size: int, num_lower: int, num_upper: int, num_state_bytes: int) -> ReservationSize:
    num_upper = num_upper if layout.upper_layers else 0
    num_blocks = len(layout.lower_layers) * -(-num_lower // block_size) + len(layout.upper_layers) * -(-num_upper // block_size)
    return ReservationSize(num_lower, num_upper, num_blocks, num_state_bytes)
