"""Refuses what can never succeed, before any work, in words that say what to change. Knows limits; knows no tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import InvalidConfig, InvalidRequest, NotFound
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model and the operator allow. `visibilities` are in the operator's order, the first is the default."""

    num_layers: int
    vocab_size: int
    max_context: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...]
    visibilities: tuple[Visibility, ...]
    max_boundary_tokens: int
    model: str = ""  # the served name

    def __post_init__(self) -> None:
        """Raises InvalidConfig when an operator's visibility does not fit the model."""
        for visibility in self.visibilities:
            try:
                visibility.resolve(self.num_layers)
            except InvalidRequest as error:
                raise InvalidConfig(str(error)) from error
            if (visibility.boundary_tokens or 1) > self.max_boundary_tokens:
                raise InvalidConfig(f"visibility '{visibility}' exceeds the boundary limit of {self.max_boundary_tokens} tokens")

    @property
    def policies(self) -> tuple[Visibility, ...]:
        """The allow-list: what each entry is on this model, without its boundary, each once."""
        return tuple(dict.fromkeys(visibility.resolve(self.num_layers).policy for visibility in self.visibilities))


def check_model(model: str, served: str) -> None:
    """Raises NotFound when the request names another model than the one served; an empty name means that one."""
    if model not in ("", served):
        raise NotFound(f"model {model!r} is not served here; the model is {served!r}")


def check_text(text: str) -> None:
    """Raises InvalidRequest when there is nothing to answer."""
    if not text:
        raise InvalidRequest("the prompt is empty; send some text")


def check_token_ids(token_ids: Sequence[int], vocab_size: int, what: str = "input_ids") -> None:
    """Raises InvalidRequest that names the first id outside the vocabulary, or says that there are none."""
    if not token_ids or max(token_ids) < vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(f"{what}[{index}] is {token_id}; the model's ids lie in 0…{vocab_size - 1}")


def check_prompt_length(num_tokens: int, max_context: int, *, at_least: bool = False) -> None:
    """Raises InvalidRequest when the prompt is empty or leaves no room for an answer."""
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty; send at least one token")
    if num_tokens >= max_context:
        some = "at least " if at_least else ""
        raise InvalidRequest(
            f"the prompt has {some}{num_tokens} tokens; the context limit is {max_context}, answer included: shorten the prompt"
        )


def check_visibility(text: str | None, limits: RequestLimits) -> Visibility:
    """The visibility a request asks for, its boundary not yet resolved; the operator's first when it asks for none.

    Raises InvalidRequest when it cannot be read, does not fit the model, is not allowed, or its boundary is too long.
    """
    if text is None:
        return limits.visibilities[0]
    visibility = Visibility.parse(text)
    if visibility.resolve(limits.num_layers).policy not in limits.policies:
        allowed = ", ".join(str(policy) for policy in limits.policies)
        raise InvalidRequest(f"visibility '{text}' is not allowed here; allowed: {allowed}")
    if (visibility.boundary_tokens or 1) > limits.max_boundary_tokens:
        raise InvalidRequest(
            f"visibility '{text}': boundary {visibility.boundary_tokens} exceeds the limit of {limits.max_boundary_tokens} tokens"
        )
    return visibility
