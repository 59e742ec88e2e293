"""The gRPC door: public messages, up to the point where a worker would be asked. Knows no socket."""

import asyncio
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from shoal.config.images import ImageLimits
from shoal.errors import ShoalError
from shoal.model_files import load_tokenizer, open_model, write_random_model
from shoal.pb.v1 import shoal_pb2
from shoal.router.admission import Admission
from shoal.router.field_sizes import check_sizes
from shoal.router.http.errors import answer_error
from shoal.router.images import ImageCheck
from shoal.router.service import RouterService
from shoal.router.text import ChatTemplate, PromptEncoder
from shoal.router.validation import RequestLimits
from shoal.rpc.parsing import read_message
from shoal.visibility import Visibility
from tests.folders import temporary_folder
from tests.fuzz.draw import Draw
from tests.fuzz.image_targets import picture
from tests.fuzz.target import Target

VISIBILITIES = ("full", "speed:2", "pop:2", "speed:2:boundary=4", "speed:99", "full:boundary=64", "pop:2:late")
# A template that takes tools and is strict about what it gets, as Qwen's is.
_TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson) }}{% endfor -%}
{{ '<|im_end|>\\n' }}{% endfor -%}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class _NoVetter:
    """Constraints are vetted by a process of their own, and fuzzed by its own tests."""

    async def check(self, constraint: object) -> None:
        pass


@cache
def admissions() -> tuple[Admission, ...]:
    """One for a template that takes no tools, one for a template that does, one for a model that sees images."""
    folder = write_random_model(temporary_folder(), vocab_size=300)
    model, made = open_model(str(folder)), []
    shape = model.config.shape
    limits = RequestLimits(
        shape.num_layers, shape.vocab_size, 512, (2,), tuple(map(Visibility.parse, VISIBILITIES[:3])), 64, "random"
    )
    for source in (None, _TEMPLATE):
        encoder = PromptEncoder(load_tokenizer(model))
        if source is not None:
            encoder._template = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>")
        made.append(Admission(encoder, limits, _NoVetter()))  # type: ignore[arg-type]
    return *made, _seeing(limits)


def _seeing(limits: RequestLimits) -> Admission:
    model = open_model(str(write_random_model(temporary_folder(), architecture="qwen3_vl", vocab_size=320)))
    encoder, check = (
        PromptEncoder(load_tokenizer(model), model.vision),
        ImageCheck(model.vision, ImageLimits(), limits.num_layers),
    )
    return Admission(encoder, replace(limits, vocab_size=320), _NoVetter(), images=check)  # type: ignore[arg-type]


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def tools(draw: Draw) -> Any:
    """OpenAI's `tools`, nearly."""
    return [
        {
            "type": draw.pick(("function", "function", "function", "code")),
            "function": {
                "name": draw.pick(("f", "g", "f\n", "get-weather", draw.text())),
                "description": draw.pick(("", "what", 3)),
                "parameters": draw.pick(({}, {"type": "object", "properties": {"a": {"type": "integer"}}}, draw.json(3))),
            },
        }
        if draw.chance(80)
        else draw.json(3)
        for _ in range(draw.count(3))
    ]


def tool_choice(draw: Draw) -> Any:
    return draw.pick(("none", "auto", "required", {"type": "function", "function": {"name": "f"}}, draw.json(4)))


def calls(draw: Draw) -> Any:
    arguments = draw.pick(("{}", '{"a": 1}', draw.json_text(draw.json(3)), draw.json(3)))
    call = {"id": draw.pick(("1", 7)), "type": "function", "function": {"name": "f", "arguments": arguments}}
    return draw.pick(([call], [call, call], draw.json(3), [draw.json(3)]))


HINTS: dict[str, Any] = {
    "visibility": lambda draw: draw.pick(VISIBILITIES),
    "model": lambda draw: draw.pick(("", "", "random", "other")),
    "role": lambda draw: draw.pick(("user", "assistant", "system", "tool")),
    "tools_json": lambda draw: draw.json_text(tools(draw)),
    "tool_choice_json": lambda draw: draw.json_text(tool_choice(draw)),
    "tool_calls_json": lambda draw: draw.json_text(calls(draw)),
    "input_ids": lambda draw: draw.below(310),
    "max_tokens": lambda draw: draw.below(500),
    "top_p": lambda draw: draw.below(101) / 100,
    "n": lambda draw: 1 + draw.below(5),
    "priority": lambda draw: draw.pick(("", "", "low", "high")),
    "data": picture,
    "text": lambda draw: draw.pick(("a", "<|image_pad|>", "see <|vision_start|><|image_pad|><|vision_end|>", draw.text())),
}


def _grpc_message(draw: Draw) -> tuple[type, bytes]:
    kind = draw.pick(
        (shoal_pb2.GenerateRequest,) * 6
        + (shoal_pb2.ScoreRequest, shoal_pb2.TokenizeRequest, shoal_pb2.DetokenizeRequest, shoal_pb2.AbortRequest)
    )
    return kind, draw.damaged(draw.message(kind(), HINTS).SerializeToString())


def _ask(found: Any, admission: Admission) -> None:
    """What the service does with a message before a worker hears of it."""
    if isinstance(found, shoal_pb2.GenerateRequest):
        loop().run_until_complete(admission.admit(found, 0.0))
    elif isinstance(found, shoal_pb2.ScoreRequest):
        loop().run_until_complete(admission.admit_score(found, 0.0))
    else:
        loop().run_until_complete(_small(found, admission))


async def _small(found: Any, admission: Admission) -> None:
    if isinstance(found, shoal_pb2.TokenizeRequest):
        await _service(admission).tokenize(found)
    elif isinstance(found, shoal_pb2.DetokenizeRequest):
        await _service(admission).detokenize(found)
    elif isinstance(found, shoal_pb2.AbortRequest):
        check_sizes(found)


@cache
def _service(admission: Admission) -> Any:
    tokenizer = admission._encoder._tokenizer
    return RouterService(SimpleNamespace(admission=admission, tokenizer=tokenizer), lambda: 0.0)  # type: ignore[arg-type]


def call_grpc(given: tuple[type, bytes]) -> None:
    found = read_message(*given)
    for admission in admissions():
        try:
            _ask(found, admission)
        except ShoalError as error:
            answer_error(error)
            last: ShoalError | None = error
        else:
            last = None
    if last is not None:
        raise last


TARGETS = (Target("grpc", 30, _grpc_message, call_grpc),)
