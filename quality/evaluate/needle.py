"""Needles: one sentence with a number, hidden at some depth of a long prompt and asked for at its end."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.model_files import PromptEncoder, Tokenizer
from shoal.quality.data import Record

_QUESTION = "What is the special magic number mentioned in the text above? Answer with the number."


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt and the number it hides."""

    num_tokens: int  # asked for; the prompt may be some tokens shorter
    depth: float  # 0 = at the text's beginning, 1 = at its end
    prompt_ids: tuple[int, ...]
    answer: str


def make_needles(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    per_cell: int = 1,
    seed: int = 0,
) -> list[Needle]:
    """`per_cell` prompts for every length and depth, through the chat template where there is one.

    Raises InvalidConfig where the texts are too short, or a length leaves no room for a text.
    """
    encoder = PromptEncoder(tokenizer)
    rng = random.Random(seed)
    filler: list[int] = []
    for record in rng.sample(list(records), len(records)):
        filler += tokenizer.encode((record.text or "") + "\n\n", add_special_tokens=False)
        if len(filler) > 4 * max(lengths):
            break
    if len(filler) <= max(lengths):
        raise InvalidConfig(f"the data's texts have {len(filler)} tokens; needles of {max(lengths)} need more text")
    needles = []
    for length in lengths:
        for depth in depths:
            for _ in range(per_cell):
                answer = str(rng.randint(1000, 9999))
                needle = f"\n\nThe special magic number is {answer}. Remember it.\n\n"
                room = length - len(_prompt(encoder, needle)) - 8
                if room < 1:
                    raise InvalidConfig(f"a needle's prompt of {length} tokens has no room for a text; ask for longer ones")
                start = rng.randrange(len(filler) - room)
                cut = filler[start : start + room]
                at = round(depth * room)
                text = tokenizer.decode(cut[:at]) + needle + tokenizer.decode(cut[at:])
                needles.append(Needle(length, depth, _prompt(encoder, text), answer))
    return needles


def is_found(needle: Needle, answer: str) -> bool:
    """Whether an answer's text holds the number."""
    return needle.answer in answer


def _prompt(encoder: PromptEncoder, text: str) -> tuple[int, ...]:
    whole = f"Read this text.\n\n{text}\n\n{_QUESTION}"
    if encoder.has_chat_template:
        return encoder.encode_chat([{"role": "user", "content": whole}]).token_ids
    return encoder.encode_text(whole + " The special magic number is").token_ids
