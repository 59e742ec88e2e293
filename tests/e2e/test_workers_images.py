"""Prompts with images over two workers and a real pair: the single process's answers, whatever is cached, and what is refused."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL.Image import Image

from shoal.config.worker import Pool, WorkerConfig
from shoal.engine.local import LocalResult
from shoal.engine.vision.pictures import read_picture
from shoal.errors import CapacityExceeded, InvalidRequest, ShoalError, Unavailable, Unsupported
from shoal.pb.internal.v1 import worker_pb2 as pb
from shoal.placement.prefix_cache import PrefixCache
from shoal.types import PromptImage
from shoal.visibility import Visibility
from tests import engine_support as support
from tests import image_support as images
from tests.e2e.harness import (
    Answer,
    Ask,
    decode_request,
    ends_with,
    generate,
    generate_all,
    in_process,
    make_config,
    prefill_request,
    processes,
)
from tests.e2e.test_workers import assert_equal

GEMMA, QWEN = images.VARIANTS
KINDS = ("full", "speed:2", "speed:3:anchors=2", "speed:4:anchors=0", "pop:2", "pop:3:late")
PATTERNS = ("4a5", "2a2b3c4", "9b3")


def config(variant: str, pool: Pool, **changes: object) -> WorkerConfig:
    allowed = tuple(Visibility.parse(kind) for kind in KINDS)
    return make_config(pool, support.model_files(variant).path, allowed_visibilities=allowed, **changes)


def ask(variant: str, pattern: str, visibility: str, max_tokens: int = 5, **changes: object) -> Ask:
    ids, placed = images.prompt(variant, pattern)
    return Ask(ids, visibility, max_tokens, images=placed, **changes)  # type: ignore[arg-type]


def asks_of(variant: str) -> list[Ask]:
    asks = [
        ask(variant, pattern, f"{kind}:boundary={1 + (index + at) % 3}", seed=at, temperature=0.8 * (at % 3 == 1))
        for index, pattern in enumerate(PATTERNS)
        for at, kind in enumerate(KINDS)
    ]
    return [*asks, Ask(support.prompt(30, 4, 290)[6:], "pop:2"), Ask((7,), "full")]


def local(variant: str, asks: Sequence[Ask]) -> list[LocalResult]:
    requests = [
        replace(
            support.greedy(
                own.prompt_ids, own.visibility, own.max_tokens, own.replay, temperature=own.temperature, seed=own.seed
            ),
            images=own.images,
        )
        for own in asks
    ]
    return images.engine(variant, token_budget=29).generate(requests)


async def in_turn(asks: Sequence[Ask], *endpoints: object) -> list[Answer]:
    return [await generate(own, *endpoints, num_layers=_num_layers(own)) for own in asks]  # type: ignore[arg-type]


def _num_layers(own: Ask) -> int:
    return 5 if own.images and own.images[0].span.grid is not None else 7


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("variant", images.VARIANTS)
async def test_every_visibility_equals_the_single_process(variant: str, budget: int) -> None:
    asks = [own for own in asks_of(variant) if variant == QWEN or own.images or own]
    shape = support.model_files(variant).config.shape
    prefill, decode = config(variant, Pool.PREFILL, token_budget=budget), config(variant, Pool.DECODE, token_budget=budget)
    async with in_process(prefill, decode) as (*_, one, other):
        answers = await generate_all(asks, one, other, num_layers=shape.num_layers)
    expected = local(variant, asks)
    for own, answer, result in zip(asks, answers, expected, strict=True):
        assert tuple(answer.token_ids) == result.token_ids, own.visibility
        assert answer.finished is not None and answer.reserved.plan_bytes == answer.finished.received_payload_bytes
    if variant == QWEN:  # no windows: the plan is the arithmetic's
        assert_equal(asks, answers, expected, shape)


@pytest.mark.e2e
@pytest.mark.parametrize("variant", images.VARIANTS)
async def test_two_processes(variant: str, tmp_path: Path) -> None:
    asks = asks_of(variant)
    num_layers = support.model_files(variant).config.shape.num_layers
    async with processes(tmp_path, config(variant, Pool.PREFILL), config(variant, Pool.DECODE)) as (prefill, decode):
        answers = await generate_all(asks, prefill.endpoint, decode.endpoint, num_layers=num_layers)
        await decode.endpoint.idle(Pool.DECODE)
        await prefill.endpoint.idle(Pool.PREFILL)
    assert [tuple(answer.token_ids) for answer in answers] == [result.token_ids for result in local(variant, asks)]


@pytest.mark.parametrize("where", ["both", "decode", "prefill"])
@pytest.mark.parametrize("variant", images.VARIANTS)
async def test_a_cached_prefix_is_the_images_own(variant: str, where: str) -> None:
    """Equal tokens with another picture share nothing; the same picture, and the next turn of a conversation, are found."""
    num_layers = support.model_files(variant).config.shape.num_layers
    cached = {pool: where in ("both", str(pool)) for pool in (Pool.PREFILL, Pool.DECODE)}
    prefill, decode = (config(variant, pool, prefix_cache=cached[pool], block_size=4) for pool in cached)
    for kind in KINDS:
        first = ask(variant, "9a5", kind)
        other = images.picture(99)  # of the same size
        (shown,) = images.vision(variant).place(first.prompt_ids, [other])
        asks = [first, replace(first, images=(shown,)), first, replace(first, images=(shown,), cache_salt="another")]
        async with in_process(prefill, decode) as (*_, one, two):
            answers = [await generate(own, one, two, num_layers=num_layers) for own in asks]
            more = support.prompt(20, 8, 290)[7:]
            longer = replace(first, prompt_ids=(*first.prompt_ids, *answers[0].token_ids, *more))
            asks.append(longer)
            answers.append(await generate(longer, one, two, num_layers=num_layers))
        assert [tuple(answer.token_ids) for answer in answers] == [result.token_ids for result in local(variant, asks)], kind
        held = [answer.reserved.cached_tokens + (answer.prefill.cached_tokens if answer.prefill else 0) for answer in answers]
        before = first.images[0].span.start // 4 * 4
        assert held[0] == held[3] == 0 and held[1] <= 2 * before
        by_decode = where != "prefill" and variant == QWEN  # what windows hide is gone from decode when the answer ends
        by_prefill = where != "decode" and kind != "pop:3:late"
        if by_decode or by_prefill:
            assert held[2] > first.images[0].span.start and held[4] > first.images[0].span.start


@pytest.mark.parametrize("variant", images.VARIANTS)
async def test_a_damaged_image_ends_its_own_request(variant: str) -> None:
    num_layers = support.model_files(variant).config.shape.num_layers
    sound = ask(variant, "4a5", "pop:2")
    cut = images.vision(variant).place(sound.prompt_ids, [images.PICTURES[0][:-100]])
    wrong = (PromptImage(images.picture(5), sound.images[0].span),)
    async with in_process(config(variant, Pool.PREFILL), config(variant, Pool.DECODE)) as (*_, one, two):
        for bad, words in ((cut, "cannot be decoded"), (wrong, "digest")):
            error = await ends_with(generate(replace(sound, images=bad), one, two, num_layers=num_layers))
            assert isinstance(error, InvalidRequest) and words in str(error)
        (answer,) = await generate_all([sound], one, two, num_layers=num_layers)
    assert tuple(answer.token_ids) == local(variant, [sound])[0].token_ids


async def test_who_would_wait_long_to_be_seen_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As who would wait long for blocks is: the files of all that wait are in memory. A place comes free when somebody leaves."""
    first, second, third = ask(QWEN, "4a5", "pop:2"), ask(QWEN, "4b5", "pop:2"), ask(QWEN, "3c3", "speed:2")
    entered, go = threading.Event(), threading.Event()

    def slowly(data: bytes) -> Image:
        entered.set()
        go.wait(20)
        return read_picture(data)

    monkeypatch.setattr("shoal.engine.vision.tower.read_picture", slowly)
    async with in_process(config(QWEN, Pool.PREFILL, max_queued=0), config(QWEN, Pool.DECODE)) as (*_, one, two):
        try:
            leaving = asyncio.create_task(generate(first, one, two, num_layers=5))
            await asyncio.to_thread(entered.wait, 20)
            error = await ends_with(generate(second, one, two, num_layers=5))
            assert isinstance(error, CapacityExceeded) and "wait for their images to be seen; retry later" in str(error)
            leaving.cancel()
            await asyncio.wait([leaving])
            await one.idle(Pool.PREFILL)
        finally:
            go.set()
        answer = await generate(third, one, two, num_layers=5)
    assert tuple(answer.token_ids) == local(QWEN, [third])[0].token_ids


async def test_what_is_refused_where() -> None:
    """Each worker checks for itself what the router has checked."""
    own = ask(QWEN, "4a5", "pop:2")
    changes = {
        "boundary": replace(own, visibility="pop:2:boundary=6"),
        "belong to no image": replace(own, images=()),
        "no image tokens at": replace(own, images=(_moved(own.images[0]),)),
        "anchors": ask(QWEN, "a5", "speed:3:anchors=2"),
    }
    async with in_process(config(QWEN, Pool.PREFILL), config(QWEN, Pool.DECODE)) as (*_, one, two):
        for words, wrong in changes.items():
            error = await ends_with(generate(wrong, one, two, num_layers=5))
            assert isinstance(error, InvalidRequest) and words in str(error)
            reserved = pb.Reserved(attempt_id="a", visibility=str(Visibility.parse(wrong.visibility).resolve(5)))
            error = await ends_with(_prefill(one, prefill_request(wrong, reserved)))
            assert isinstance(error, InvalidRequest) and words.replace("boundary", "lie in the prompt") in str(error)


def _moved(image: PromptImage) -> PromptImage:
    return PromptImage(image.data, replace(image.span, start=image.span.start - 1))


async def _prefill(endpoint: object, request: pb.PrefillRequest) -> None:
    import grpc

    from shoal.rpc import error_from_rpc

    try:
        await endpoint.prefill.Prefill(request, timeout=20)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


async def test_a_worker_may_be_started_without_a_tower() -> None:
    own = ask(GEMMA, "4a5", "pop:2")
    async with in_process(config(GEMMA, Pool.PREFILL, sees_images=False), config(GEMMA, Pool.DECODE)) as (*_, one, two):
        error = await ends_with(generate(own, one, two, num_layers=7))
        assert isinstance(error, Unsupported) and "started without" in str(error)


async def test_decode_never_prefills_images() -> None:
    own = ask(GEMMA, "4a5", "speed:2", local_below=1000)
    async with in_process(config(GEMMA, Pool.PREFILL), config(GEMMA, Pool.DECODE)) as (*_, one, two):
        (answer,) = await generate_all([own], one, two, num_layers=7)
        assert answer.reserved.prefill_at == "prefill_worker" and answer.reserved.prefill_reason == "images"
        assert tuple(answer.token_ids) == local(GEMMA, [own])[0].token_ids
        request = decode_request(own, 7)
        request.local_prefill.no_prefill_worker = True
        assert isinstance(await ends_with(_decode(two, request)), Unavailable)
    async with in_process(config(GEMMA, Pool.PREFILL), config(GEMMA, Pool.DECODE, colocated=True)) as (*_, two):
        error = await ends_with(_decode(two, decode_request(own, 7)))
        assert isinstance(error, Unsupported) and "prefill workers" in str(error)


async def _decode(endpoint: object, request: pb.DecodeRequest) -> None:
    import grpc

    from shoal.rpc import error_from_rpc

    try:
        async for _ in endpoint.decode.Decode(request, timeout=20):  # type: ignore[attr-defined]
            pass
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


@pytest.mark.parametrize("variant", images.VARIANTS)
async def test_a_resumed_request_prefills_its_images_again(variant: str) -> None:
    num_layers = support.model_files(variant).config.shape.num_layers
    for kind in ("full", "speed:2", "pop:3:late"):
        whole = ask(variant, "4a2b5", kind, 6)
        expected = local(variant, [whole])[0].token_ids
        resumed = replace(whole, replay=expected[:3], max_tokens=3)
        several = replace(whole, num_children=3, temperature=0.9)
        async with in_process(config(variant, Pool.PREFILL), config(variant, Pool.DECODE)) as (*_, one, two):
            answers = await generate_all([resumed, several, whole], one, two, num_layers=num_layers)
        assert tuple(answers[0].token_ids) == expected[3:] and tuple(answers[2].token_ids) == expected
        assert len(answers[1].children) == 3


async def test_a_model_of_text_refuses_images(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ask(QWEN, "4a5", "pop:2")
    plain = (
        make_config(Pool.PREFILL, support.model_files("llama").path),
        make_config(Pool.DECODE, support.model_files("llama").path),
    )
    async with in_process(*plain) as (*_, one, two):
        error: ShoalError = await ends_with(generate(own, one, two))
        assert isinstance(error, Unsupported) and "sees no images" in str(error)
    for module in ("shoal.engine.resident", "shoal.prefill_worker.lifecycle"):
        monkeypatch.setattr(f"{module}.missing_library", lambda: "images need Pillow; install shoal[vision]")
    async with in_process(config(QWEN, Pool.PREFILL), config(QWEN, Pool.DECODE)) as (*_, one, two):
        error = await ends_with(generate(own, one, two, num_layers=5))
        assert isinstance(error, Unsupported) and "install shoal[vision]" in str(error)
        text = replace(own, images=(), prompt_ids=tuple(token + 1 if token == 5 else token for token in own.prompt_ids))
        assert (await generate(text, one, two, num_layers=5)).token_ids


@pytest.mark.parametrize("variant", images.VARIANTS)
async def test_a_cached_prefix_may_end_within_an_image(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What followed has been given up. The rest of the image runs on top of what the whole of it left."""
    longest = PrefixCache._longest
    monkeypatch.setattr(PrefixCache, "_longest", lambda *given: min(20, longest(*given)))
    num_layers = support.model_files(variant).config.shape.num_layers
    pools = (Pool.PREFILL, Pool.DECODE)
    prefill, decode = (config(variant, pool, prefix_cache=True, block_size=4, token_budget=5) for pool in pools)
    for kind in ("full", "speed:2", "pop:2"):
        own = ask(variant, "9a5", kind)
        span = own.images[0].span
        async with in_process(prefill, decode) as (*_, one, two):
            answers = [await generate(own, one, two, num_layers=num_layers) for _ in range(2)]
        assert span.start < 20 < span.stop
        assert answers[1].prefill is not None and answers[1].prefill.cached_tokens == 20
        assert [tuple(answer.token_ids) for answer in answers] == [local(variant, [own])[0].token_ids] * 2
