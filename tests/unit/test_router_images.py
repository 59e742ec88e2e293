"""Images through both doors, up to what the workers are told, with workers that are fakes."""

import asyncio
import base64
import hashlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from click.testing import CliRunner, Result

from shoal.cli.generate import generate
from shoal.cli.info import info
from shoal.client import AsyncClient, Image, Message, Sampling
from shoal.config.images import MAX_IMAGE_MB, MAX_IMAGE_MEGAPIXELS, ImageLimits
from shoal.config.shadow import ShadowConfig
from shoal.errors import InvalidConfig, InvalidRequest, Unavailable
from shoal.model_files import image_header
from shoal.pb.v1 import shoal_pb2
from shoal.router.shadow import Shadows
from tests.fakes.cluster import Cluster, request
from tests.fakes.images import FIXED, PLACEHOLDER, SCALED, give_eyes, picture, promised

A, B = picture(seed=1), picture(96, 64, seed=2, form="JPEG")


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    give_eyes(monkeypatch)
    async with Cluster(visibilities=("full", "speed:22", "pop:20")) as c:
        yield c


def part(data: bytes, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(*content: str | bytes, role: str = "user") -> shoal_pb2.ChatInput:
    parts = [
        shoal_pb2.ContentPart(text=each) if isinstance(each, str) else shoal_pb2.ContentPart(image=shoal_pb2.Image(data=each))
        for each in content
    ]
    return shoal_pb2.ChatInput(messages=[shoal_pb2.ChatMessage(role=role, content_parts=parts)])


def images(*files: bytes) -> list[shoal_pb2.Image]:
    return [shoal_pb2.Image(data=data) for data in files]


async def test_both_doors_send_files_to_prefill_and_places_to_decode(cluster: Cluster) -> None:
    content = [{"type": "text", "text": "Compare"}, part(A), part(B, "image/jpeg", detail="auto"), {"type": "text", "text": "!"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "visibility": "speed:22"}
    async with httpx.AsyncClient(base_url=cluster.http) as web:
        answer = (await web.post("/v1/chat/completions", json=body)).json()
        counted = (await web.post("/tokenize", json={"messages": body["messages"]})).json()["count"]
    over_grpc = await cluster.complete(
        shoal_pb2.GenerateRequest(
            chat=chat("Compare", A, B, "!"), visibility="speed:22", sampling_params=shoal_pb2.SamplingParams(max_tokens=3)
        )
    )
    assert answer["shoal"]["image_tokens"] == over_grpc.image_tokens == 18
    assert answer["usage"]["prompt_tokens"] == over_grpc.prompt_tokens == counted
    assert over_grpc.transfer.prefill_reason == "images" and over_grpc.transfer.prefill_at == "prefill_worker"
    for decoded, prefilled in zip(cluster.decode[0].seen, cluster.prefill[0].seen, strict=True):
        starts = [at for at, token in enumerate(decoded.prompt_ids) if token == FIXED.image_token_id]
        spans = [(span.start, span.num_tokens, span.digest) for span in decoded.images]
        assert spans == [(starts[0], 9, hashlib.sha256(A).digest()), (starts[9], 9, hashlib.sha256(B).digest())]
        assert [image.data for image in prefilled.images] == [A, B]
        assert [image.span for image in prefilled.images] == list(decoded.images)
        assert A[40:80] not in decoded.SerializeToString()


async def test_texts_and_ids_have_a_placeholder_for_each_image(cluster: Cluster) -> None:
    text = f"See {PLACEHOLDER} and {PLACEHOLDER}: what is it?"
    sampling = shoal_pb2.SamplingParams(max_tokens=2)
    ids = (await cluster.stub.Tokenize(shoal_pb2.TokenizeRequest(text=text, images=images(A, B)))).token_ids
    one = await cluster.complete(shoal_pb2.GenerateRequest(text=text, images=images(A, B), sampling_params=sampling))
    given = shoal_pb2.TokenizedInput(input_ids=[700, FIXED.placeholder_id, 701, 702])
    two = await cluster.complete(shoal_pb2.GenerateRequest(tokenized=given, images=images(A), sampling_params=sampling))
    assert (one.image_tokens, two.image_tokens) == (18, 9)
    first, second = (list(seen.prompt_ids) for seen in cluster.decode[0].seen)
    assert first == list(ids) and second[0] == 700 and second[-2:] == [701, 702] and second.count(6) == 9
    info = await cluster.stub.GetModelInfo(shoal_pb2.GetModelInfoRequest())
    assert info.supports_vision and (info.image_placeholder, info.image_token_id) == (PLACEHOLDER, 5)


async def test_the_size_of_an_image_decides_how_many_tokens_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    give_eyes(monkeypatch, SCALED)
    async with Cluster(visibilities=("full", "speed:1")) as c:
        wide = picture(128, 64)
        done = await c.complete(shoal_pb2.GenerateRequest(chat=chat(wide, "?"), sampling_params={"max_tokens": 2}))
        [span] = c.decode[0].seen[0].images
        assert done.image_tokens == span.num_tokens == 8 and list(span.grid) == [1, 2, 4]
        status, words = await c.status(shoal_pb2.GenerateRequest(chat=chat(wide, "?"), visibility="speed:1"))
        assert status is grpc.StatusCode.INVALID_ARGUMENT and "lower 2 layers" in words
        status, words = await c.status(shoal_pb2.GenerateRequest(chat=chat(picture(3, 900), "?")))
        assert status is grpc.StatusCode.INVALID_ARGUMENT and "image 0: an image of 3 × 900 pixels is too long" in words
    async with Cluster(visibilities=("full",), max_context=40) as c:
        status, words = await c.status(shoal_pb2.GenerateRequest(chat=chat(*[wide] * 5, "?")))
        assert status is grpc.StatusCode.INVALID_ARGUMENT and "at least 40 tokens; the context limit is 40" in words


async def test_score_children_and_retries_keep_their_images(cluster: Cluster) -> None:
    question = shoal_pb2.ScoreRequest(
        text=f"{PLACEHOLDER} It is", images=images(A), continuation_text=" blue", logprobs=1, visibility="pop:20"
    )
    score = await cluster.stub.Score(question)
    assert score.prompt_tokens > 9 and [image.data for image in cluster.prefill[0].seen[-1].images] == [A]
    asked = shoal_pb2.GenerateRequest(chat=chat(A, "?"), sampling_params={"max_tokens": 2, "n": 3})
    replies = await cluster.replies(asked)
    assert [reply.complete.image_tokens for reply in replies] == [9, 9, 9]
    cluster.prefill[0].next_error = Unavailable("gone")
    done = await cluster.complete(shoal_pb2.GenerateRequest(chat=chat(A, "?"), sampling_params={"max_tokens": 2}))
    assert done.num_retries == 1
    assert all([image.data for image in seen.images] == [A] for seen in cluster.prefill[0].seen)


BIG = 1 + int(MAX_IMAGE_MB * 1e6)
BAD: list[tuple[list[bytes], str]] = [
    ([A, b""], "image 1 is empty"),
    ([b"GIF, nearly"], "image 0: an image is no PNG, JPEG, WebP or GIF file"),
    ([B[:20]], "image 0: an image is no PNG, JPEG, WebP or GIF file"),
    ([A, promised(100_000, 100_000)], "image 1: a PNG image of 100000 × 100000 pixels is too large"),
    ([promised(6000, 5000)], "image 0: an image of 6000 × 5000 pixels is too large; at most 20000000 pixels"),
    ([promised(0, 5)], "image 0: a PNG image of 0 × 5 pixels has nothing to see"),
    ([A + bytes(BIG)], "bytes; send at most 20000000"),
    ([A] * 4, "the request has 4 images; send at most 3"),
    ([A + bytes(12_000_000)] * 2, "bytes together; send at most 20000000"),
]


@pytest.mark.parametrize(("files", "words"), BAD, ids=[words[:40] for _, words in BAD])
async def test_bad_images_are_refused_by_number(monkeypatch: pytest.MonkeyPatch, files: list[bytes], words: str) -> None:
    """Before a worker hears of them, whatever door and form (content_parts, images) they come by."""
    give_eyes(monkeypatch)
    limits = ImageLimits(max_images=3, max_images_mb=20, max_image_megapixels=20)
    async with Cluster(visibilities=("full",), images=limits) as c:
        for asked in (
            shoal_pb2.GenerateRequest(chat=chat(*files, "?")),
            shoal_pb2.GenerateRequest(text=PLACEHOLDER * len(files) + "?", images=images(*files)),
            shoal_pb2.GenerateRequest(tokenized={"input_ids": [5] * len(files) + [9]}, images=images(*files)),
        ):
            status, said = await c.status(asked)
            assert status is grpc.StatusCode.INVALID_ARGUMENT and words in said and len(said) < 300
        assert not c.decode[0].seen and not c.prefill[0].seen


async def test_images_where_none_can_be(cluster: Cluster) -> None:
    invalid, unsupported = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
    boundary = shoal_pb2.GenerateRequest(text=f"Look: {PLACEHOLDER} a", images=images(A), visibility="pop:20:boundary=9")
    anchors = shoal_pb2.GenerateRequest(
        text=f"{PLACEHOLDER} and so on", images=images(A), visibility="speed:22:anchors=7:boundary=1"
    )
    scored = shoal_pb2.GenerateRequest(chat=chat(A, "?"), sampling_params={"prompt_logprobs": 1}, visibility="full")
    both = shoal_pb2.GenerateRequest(chat=chat(A, "?"), images=images(A))
    twice = shoal_pb2.GenerateRequest(
        chat=shoal_pb2.ChatInput(messages=[{"role": "user", "content": "a", "content_parts": [{"text": "b"}]}])
    )
    for asked, status, words in (
        (shoal_pb2.GenerateRequest(text=f"{PLACEHOLDER} {PLACEHOLDER}", images=images(A)), invalid, "2 image placeholders"),
        (shoal_pb2.GenerateRequest(text="no place", images=images(A)), invalid, "has 0 image placeholders"),
        (shoal_pb2.GenerateRequest(text=f"a {PLACEHOLDER}"), invalid, "1 image placeholders (<file_sep>) and 0 images"),
        (shoal_pb2.GenerateRequest(chat=chat(A, f"and {PLACEHOLDER}")), invalid, "2 image placeholders"),
        (shoal_pb2.GenerateRequest(text="a <filename> b"), invalid, "stands for parts of an image"),
        (request([3, 6, 6]), invalid, "2 image tokens"),
        (shoal_pb2.GenerateRequest(chat=chat(A, role="assistant")), invalid, "only the user shows images"),
        (boundary, invalid, "within its boundary"),
        (anchors, invalid, "anchors"),
        (scored, unsupported, "prompt_logprobs run the whole prompt on decode, which sees no images"),
        (both, invalid, "parts of a message's content"),
        (twice, invalid, "content and content_parts"),
    ):
        assert (found := await cluster.status(asked))[0] is status and words in found[1], found
    assert not cluster.decode[0].seen


async def test_a_text_model_a_colocated_cluster_and_one_without_prefill_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = shoal_pb2.GenerateRequest(chat=chat(A, "?"))
    async with Cluster(visibilities=("full",)) as c:
        assert await c.status(asked) == (grpc.StatusCode.UNIMPLEMENTED, "this model sees no images; send text alone")
        assert not (await c.stub.GetModelInfo(shoal_pb2.GetModelInfoRequest())).supports_vision
        async with httpx.AsyncClient(base_url=c.http) as web:
            answer = await web.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part(A)]}]})
        assert answer.status_code == 501 and answer.json()["error"]["code"] == "unsupported"
    give_eyes(monkeypatch)
    async with Cluster(0, 1, visibilities=("full",), prefill_fallback=True) as c:
        status, words = await c.status(asked)
        assert status is grpc.StatusCode.UNAVAILABLE and "no prefill worker" in words
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2  # text alone falls back
    async with Cluster(visibilities=("full",), images=ImageLimits(max_images=0)) as c:
        assert await c.status(asked) == (grpc.StatusCode.UNIMPLEMENTED, "this server takes no images; send text alone")
        info = await c.stub.GetModelInfo(shoal_pb2.GetModelInfoRequest())
        assert (info.supports_vision, info.image_placeholder, info.HasField("image_token_id")) == (False, "", False)


async def test_short_prompts_with_images_go_to_prefill_and_cached_ones_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    give_eyes(monkeypatch)
    async with Cluster(visibilities=("full",), local_prefill_tokens=128) as c:
        asked = shoal_pb2.GenerateRequest(text=f"{PLACEHOLDER} a b c", images=images(A), sampling_params={"max_tokens": 2})
        assert (await c.complete(asked)).transfer.prefill_reason == "images"
        c.decode[0].cached_tokens = 12  # the image, and what stands around it
        done = await c.complete(asked)
        assert (done.transfer.prefill_at, done.transfer.prefill_reason) == ("decode_worker", "short")


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("https://example.com/a.png", 501, "the server fetches nothing"),
        ("HTTP://127.0.0.1/a.png", 501, "the server fetches nothing"),
        ("file:///etc/passwd", 400, "must be a data: URL"),
        ("data:image/png,AAAA", 400, "must be a data: URL in base64"),
        ("data:image/png;base64;base64,AAAA", 400, "must be a data: URL in base64"),
        ("data:text/html;base64,AAAA", 400, "is of type 'text/html'"),
        ("data:;base64,AAAA", 400, "is of type 'text/plain'"),
        ("data:image/png;base64,A*==", 400, "is not base64"),
        ("data:image/png;base64,AAA", 400, "is not base64"),
        ("data:image/png;base64,", 400, "image 0 is empty"),
        ("data:image/png;base64,AAAA", 400, "image 0: an image is no PNG"),
        ("data:" + "x" * 100_000, 400, "must be a data: URL in base64"),
    ],
)
async def test_data_urls(cluster: Cluster, url: str, status: int, words: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    async with httpx.AsyncClient(base_url=cluster.http) as web:
        answer = await web.post("/v1/chat/completions", json=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and words in message and len(message) < 300


async def test_other_shapes_of_image_parts(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.http) as web:
        for wrong, status, words in (
            (part(A, detail="low"), 501, "image_url.detail 'low' is not offered"),
            (part(A, detail="best"), 400, "must be one of auto, high"),
            ({"type": "image_url"}, 400, "messages[0].content[0].image_url is missing"),
            ({"type": "image_url", "image_url": "data:"}, 400, "must be an object"),
            ({"type": "image_url", "image_url": {}}, 400, "image_url.url is missing"),
            (part(A) | {"text": "a"}, 400, "unknown field"),
            ({"type": "input_audio"}, 501, "only text and image_url are offered"),
        ):
            body = {"messages": [{"role": "user", "content": [wrong]}]}
            answer = await web.post("/v1/chat/completions", json=body)
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.json()
        elsewhere = {"messages": [{"role": "system", "content": [part(A)]}, {"role": "user", "content": "a"}]}
        assert "only the user shows images" in (await web.post("/v1/chat/completions", json=elsewhere)).json()["error"]["message"]


async def test_the_client_library(cluster: Cluster, tmp_path: Any) -> None:
    (file := tmp_path / "a.png").write_bytes(A)
    image, sampling = Image.read(file), Sampling(max_tokens=2)
    async with AsyncClient(cluster.address) as client:
        first = await client.complete("What is it?", images=[image], sampling=sampling)
        talk = [Message("user", (image, "What is it?"))]
        assert first.image_tokens == (await client.complete(talk, sampling=sampling)).image_tokens == 9
        assert len(await client.tokenize("What is it?", images=[image])) == first.prompt_tokens
        await client.complete(f"{PLACEHOLDER} is", raw=True, images=[image], sampling=sampling)
        assert (await client.score(f"{PLACEHOLDER} is", " red", images=[image], logprobs=1)).prompt_tokens > 9
        with pytest.raises(InvalidRequest, match="put them into the messages"):
            await client.complete(talk, images=[image])
    a, b = (list(seen.prompt_ids) for seen in cluster.decode[0].seen[:2])
    assert a == b and repr(image) == "Image()"
    with pytest.raises(InvalidRequest, match=r"none\.png' cannot be read: No such file"):
        Image.read(tmp_path / "none.png")


async def test_replays_leave_images_out(monkeypatch: pytest.MonkeyPatch) -> None:
    give_eyes(monkeypatch)

    async def never(shadows: Shadows) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Shadows, "run", never)  # what is held stays
    async with Cluster(visibilities=("speed:22", "full"), shadow=ShadowConfig(rate=1.0)) as c:
        held = c.router.service.parts.shadows._held
        await c.complete(shoal_pb2.GenerateRequest(chat=chat(A, "?"), sampling_params={"max_tokens": 2}))
        assert not held
        await c.complete(request(max_tokens=2))
        assert len(held) == 1


async def test_the_command_line(cluster: Cluster, tmp_path: Any) -> None:
    (file := tmp_path / "a.png").write_bytes(A)
    flags = ["--address", cluster.address, "--max-tokens", "2", "--stats"]

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(generate, [*flags, *arguments])

    good = await asyncio.to_thread(run, "What is it?", "--image", str(file), "--image", str(file))
    assert good.exit_code == 0 and len(cluster.decode[0].seen[0].images) == 2
    assert "18 of the prompt's are images'" in " ".join(good.output.split())
    none = await asyncio.to_thread(run, "What is it?", "--image", str(tmp_path / "none.png"))
    assert none.exit_code == 2 and "none.png' cannot be read" in none.output
    told = await asyncio.to_thread(CliRunner().invoke, info, ["--address", cluster.address])
    assert told.exit_code == 0 and "stands for one" in told.output


async def test_logs_hold_counts_and_nothing_of_an_image(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await cluster.complete(shoal_pb2.GenerateRequest(chat=chat(A, "Is it secret?"), sampling_params={"max_tokens": 2}))
    await cluster.status(shoal_pb2.GenerateRequest(chat=chat(A[:-9] + b"secret", b"secret", "Is it secret?")))
    told = "\n".join(str(vars(record)) for record in caplog.records)
    assert "image_tokens" in told and "secret" not in told and base64.b64encode(A[40:60]).decode() not in told
    assert hashlib.sha256(A).hexdigest() not in told and repr(A[40:60]) not in told


def test_limits_of_the_operator() -> None:
    assert int(MAX_IMAGE_MB * 1e6) <= image_header.MAX_IMAGE_BYTES
    assert int(MAX_IMAGE_MEGAPIXELS * 1e6) == image_header.MAX_IMAGE_PIXELS
    for values, words in (
        ({"max_images": -1}, "max_images must be 0"),
        ({"max_image_mb": 0.0}, "max_image_mb must be a number greater than 0"),
        ({"max_images_mb": float("nan")}, "max_images_mb must be a number greater than 0"),
        ({"max_image_mb": 21.0}, "max_image_mb must be at most 20"),
        ({"max_images_mb": 300.0}, "max_images_mb must be at most 200"),
        ({"max_image_megapixels": 41.0}, "max_image_megapixels must be at most 40"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            ImageLimits(**values)  # type: ignore[arg-type]


def test_the_router_imports_no_imaging_library() -> None:
    program = "import sys, shoal.router.app; print([m for m in ('PIL', 'transformers', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
