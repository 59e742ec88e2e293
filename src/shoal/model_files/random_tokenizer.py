"""Writes the tokenizer of a random model: byte-level BPE with a few merges, three special tokens, a chat template."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency


def image_chat_template(image_tokens: Sequence[str]) -> str:
    """For messages whose content is text, or parts of text and images: Gemma's placeholder, or Qwen's between its brackets."""
    begin, end, part = image_tokens
    return _IMAGE_CHAT_TEMPLATE.replace("IMAGE", begin if begin == "<start_of_image>" else begin + part + end)


def write_random_tokenizer(folder: Path, vocab_size: int, image_tokens: Sequence[str] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json with at most `vocab_size` tokens (≥ MIN_VOCAB_SIZE and the images' tokens:
    what begins an image, ends it, and stands for a part of it; they follow the special tokens)."""
    special = (*SPECIAL_TOKENS, *image_tokens)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ((first, second) for first in "Ġ" + _LETTERS for second in _LETTERS)
    merges = list(islice(pairs, vocab_size - MIN_VOCAB_SIZE - len(image_tokens)))
    tokens = [*special, *alphabet, *(first + second for first, second in merges)]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "chat_template": image_chat_template(image_tokens) if image_tokens else CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
