"""How a model's prompts hold images: how many tokens an image takes, and where they stand. Knows no pixels and no weights.

A rendered prompt has one placeholder for each image. It is expanded, as the family's processor in transformers does it, before it
is tokenised: Gemma 3 puts line breaks around, and its tokenizer merges them with those of the text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files.image_header import ImageHeader, read_image_header
from shoal.types.images import ImageSpan, PromptImage, image_digest

_MAX_RATIO = 200  # of an image's sides, in Qwen's processor


@dataclass(frozen=True, slots=True)
class ResizeRule:
    """Qwen's: an image keeps its proportions, its sides become multiples of `factor`, its area lies within bounds."""

    factor: int  # pixels of a token's side
    min_pixels: int
    max_pixels: int

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Tokens in time, height and width. Raises InvalidRequest for an image that is far too long."""
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidRequest(
                f"an image of {width} × {height} pixels is too long; one side may be {_MAX_RATIO} times the other"
            )
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
        elif rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
        return 1, rows, columns


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A model that sees images, as far as prompts and decoders must know."""

    architecture: str  # config.json's model_type
    image_token_id: int  # stands at each position of an image
    image_token: str
    placeholder_id: int  # stands once for an image in a prompt that is to be expanded
    placeholder: str
    before: str  # text in front of the image's tokens, in place of the placeholder
    after: str
    resize: ResizeRule | None = None  # None: every image has `num_fixed_tokens`
    num_fixed_tokens: int = 0
    is_bidirectional: bool = False  # an image's tokens see each other, later ones too
    num_deep_layers: int = 0  # decoder layers behind which features are added (DeepStack)

    def grid(self, width: int, height: int) -> tuple[int, int, int] | None:
        """Tokens of an image in time, height and width, where positions depend on them. Raises InvalidRequest."""
        return None if self.resize is None else self.resize.grid(width, height)

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of so many pixels, upright. Raises InvalidRequest."""
        grid = self.grid(width, height)
        return self.num_fixed_tokens if grid is None else math.prod(grid)

    def expand_text(self, text: str, images: Sequence[bytes]) -> str:
        """A rendered prompt with every image's tokens written out. Raises InvalidRequest, also where placeholders and images
        differ in number."""
        pieces = text.split(self.placeholder)
        self._check_count(len(pieces) - 1, len(images))
        if self.image_token != self.placeholder and self.image_token in text:
            raise InvalidRequest(f"the prompt's text holds {self.image_token}, which stands for parts of an image; leave it out")
        whole = [pieces[0]]
        for piece, image in zip(pieces[1:], images, strict=True):
            whole += [self.before, self.image_token * self._num_tokens(image), self.after, piece]
        return "".join(whole)

    def expand_ids(
        self, token_ids: Sequence[int], images: Sequence[bytes], encode: Callable[[str], Sequence[int]]
    ) -> tuple[int, ...]:
        """The same of token ids; `encode` gives those of `before` and `after`, without special tokens around."""
        self._check_count(sum(token == self.placeholder_id for token in token_ids), len(images))
        before, after = (tuple(encode(text)) if text else () for text in (self.before, self.after))
        left = iter(images)
        whole: list[int] = []
        for token in token_ids:
            if token != self.placeholder_id:
                whole.append(token)
            else:
                whole += [*before, *[self.image_token_id] * self._num_tokens(next(left)), *after]
        return tuple(whole)

    def place(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PromptImage, ...]:
        """Find the images in an expanded prompt. Raises InvalidRequest when its image tokens are not exactly theirs."""
        at, placed = 0, []
        starts = [at for at, token in enumerate(token_ids) if token == self.image_token_id]
        for data in images:
            header = read_image_header(data)
            num_tokens = self.num_tokens(header.width, header.height)
            if at + num_tokens > len(starts) or starts[at + num_tokens - 1] - starts[at] != num_tokens - 1:
                raise InvalidRequest(f"the prompt has no place for an image of {num_tokens} tokens; expand it for its images")
            span = ImageSpan(starts[at], num_tokens, image_digest(data), self.grid(header.width, header.height))
            placed.append(PromptImage(data, span))
            at += num_tokens
        if at != len(starts):
            raise InvalidRequest(
                f"the prompt has {len(starts)} image tokens, its {len(images)} images take {at}; leave {self.image_token} out:"
                f" one {self.placeholder} stands for a whole image"
            )
        return tuple(placed)

    def _num_tokens(self, image: bytes) -> int:
        header: ImageHeader = read_image_header(image)
        return self.num_tokens(header.width, header.height)

    def _check_count(self, num_placeholders: int, num_images: int) -> None:
        if num_placeholders != num_images:
            raise InvalidRequest(
                f"the prompt has {num_placeholders} image placeholders ({self.placeholder}) and {num_images} images; give one"
                " for each"
            )

    def check_tokenizer(self, token_to_id: Callable[[str], int | None]) -> None:
        """Raises InvalidConfig when the tokenizer calls the images' tokens otherwise."""
        for token, token_id in ((self.image_token, self.image_token_id), (self.placeholder, self.placeholder_id)):
            if token_to_id(token) != token_id:
                raise InvalidConfig(
                    f"the tokenizer has {token_to_id(token)} for {token}, config.json {token_id}; they do not fit"
                )


def check_images(
    vision: VisionConfig | None,
    prompt_ids: Sequence[int],
    spans: Sequence[ImageSpan],
    *,
    num_prefill_tokens: int,
    num_anchor_tokens: int,
    prefill_layers: int,
) -> None:
    """Whether the images fit their prompt, and how it is to be run. `prompt_ids`: all of it, or its prefill tokens.

    Raises InvalidRequest with what to change, Unsupported where the model sees no images.
    """
    if vision is None:
        if spans:
            raise Unsupported("this model sees no images; send text alone")
        return
    at = 0
    for span in spans:
        if span.start < at or span.stop > len(prompt_ids):
            raise InvalidRequest("images must lie in the prompt, one after the other")
        if any(prompt_ids[position] != vision.image_token_id for position in span.positions):
            raise InvalidRequest(f"the prompt has no image tokens at {span.start}…{span.stop - 1}; expand it for its images")
        if (span.grid is None) != (vision.resize is None):
            raise InvalidRequest(f"images of a {vision.architecture} model {'need a' if vision.resize else 'have no'} grid")
        if vision.resize is None and span.num_tokens != vision.num_fixed_tokens:
            raise InvalidRequest(
                f"an image of a {vision.architecture} model has {vision.num_fixed_tokens} tokens, not {span.num_tokens}"
            )
        at = span.stop
    if sum(span.num_tokens for span in spans) != sum(token == vision.image_token_id for token in prompt_ids):
        raise InvalidRequest("the prompt has image tokens that belong to no image; send the image, or leave them out")
    if not spans:
        return
    if spans[-1].stop > num_prefill_tokens:
        raise InvalidRequest(
            f"the prompt's last image ends at token {spans[-1].stop}, within its boundary, which begins at {num_prefill_tokens};"
            " put text behind the image or lower boundary"
        )
    if spans[0].start < num_anchor_tokens:
        raise InvalidRequest(f"an image begins at token {spans[0].start}, within {num_anchor_tokens} anchors; lower anchors")
    if prefill_layers < vision.num_deep_layers:
        raise InvalidRequest(
            f"images enter the lower {vision.num_deep_layers} layers of this model, prefill runs {prefill_layers};"
            f" take a depth of at least {vision.num_deep_layers}"
        )
