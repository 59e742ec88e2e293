"""Writes the tokenizer of a random model: byte-level BPE with a few merges, three special tokens, a chat template."""

import json
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
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # by frequency


def write_random_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with at most `vocab_size` tokens (≥ MIN_VOCAB_SIZE)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ((first, second) for first in "Ġ" + _LETTERS for second in _LETTERS)
    merges = list(islice(pairs, vocab_size - MIN_VOCAB_SIZE))
    tokens = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
