"""The body of /v1/completions to public requests, one for each prompt. Knows the four shapes of a prompt, and echo."""

from dataclasses import dataclass
from typing import Any, Final

from shoal.pb.v1 import shoal_pb2
from shoal.router.field_sizes import check_sizes
from shoal.router.http.errors import BadField, UnsupportedField
from shoal.router.http.fields import Fields, check_ids, kind_of
from shoal.router.http.sampling import (
    COMMON,
    INT32_MAX,
    include_usage,
    read_priority,
    read_response_format,
    read_sampling,
    read_visibility,
)

_OWN: Final = ("prompt", "logprobs", "echo", "best_of", "suffix", "response_format", "add_special_tokens")
COMPLETION_FIELDS: Final = frozenset((*COMMON, *_OWN))


@dataclass(frozen=True, slots=True)
class CompletionQuestion:
    """Requests in the order of their prompts, and how the answers are to be written."""

    requests: tuple[shoal_pb2.GenerateRequest, ...]
    include_usage: bool
    echo: bool
    prompt_only: bool  # max_tokens 0: the token that is sampled nevertheless is not shown

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        sampling = self.requests[0].sampling_params
        return sampling.n if sampling.HasField("n") else 1


def read_completion(fields: Fields) -> CompletionQuestion:
    """Raises BadField (400) and UnsupportedField (501) that name the field."""
    fields.check_known(COMPLETION_FIELDS)
    if fields.text("suffix"):
        raise UnsupportedField("suffix", "suffix is not offered; leave it out")
    echo = bool(fields.flag("echo"))
    prompt_only = echo and fields.raw("max_tokens") == 0
    sampling = read_sampling(
        Fields({name: fields.raw(name) for name in fields.names} | {"max_tokens": 1}) if prompt_only else fields
    )
    best_of = fields.integer("best_of", 1, INT32_MAX, bounded=False)
    if best_of is not None and best_of != (sampling.n or 1):
        raise UnsupportedField("best_of", "best_of other than n is not offered; leave it out")
    read_response_format(fields, sampling)
    num_logprobs = fields.integer("logprobs", 0, 20)
    if num_logprobs is not None:
        sampling.logprobs = num_logprobs
        if echo:
            sampling.prompt_logprobs = num_logprobs
    common = shoal_pb2.GenerateRequest(
        sampling_params=sampling,
        stream=bool(fields.flag("stream")),
        visibility=read_visibility(fields),
        model=fields.text("model") or "",
        priority=read_priority(fields),
        cache_salt=fields.text("cache_salt") or "",
    )
    check_sizes(common)  # before it is copied for each prompt
    requests = []
    for prompt in read_prompts(fields):
        request = shoal_pb2.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt)
            request.tokenized.SetInParent()
        requests.append(request)
    return CompletionQuestion(tuple(requests), include_usage(fields), echo, prompt_only)


def read_prompts(fields: Fields) -> list[str] | list[list[int]]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    value: Any = fields.need(fields.raw("prompt"), "prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        fields.refuse("prompt", f"must be a text, a list of texts, token ids or a list of such, not {kind_of(value)}")
    if not value:
        fields.refuse("prompt", "is empty; send some text")
    if isinstance(value[0], str):
        prompts: Any = fields.texts("prompt")
    elif isinstance(value[0], list):
        for index, entry in enumerate(value):
            if not isinstance(entry, list):
                raise BadField("prompt", f"prompt[{index}] must be a list of token ids, not {kind_of(entry)}")
            check_ids(entry, f"prompt[{index}]")
        prompts = value
    else:
        prompts = [check_ids(value, "prompt")]
    return prompts  # type: ignore[no-any-return]
