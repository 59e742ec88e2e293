"""Tokenizers: equal to transformers' for the same files, over every kind of text."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shoal.errors import InvalidConfig
from shoal.model_files import Tokenizer, load_tokenizer, open_model, write_random_model
from shoal.model_files.gguf_file import read_gguf
from shoal.model_files.gguf_tokenizer import _tokenizer, read_gguf_tokenizer
from shoal.model_files.random_tokenizer import CHAT_TEMPLATE

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_visibility.json").read_text())
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\n\nlines\r\n\r\n  \n x",
    "a          long      run   of    spaces",
    "12345 and 3.14159, 1,000,000; x86_64 2nd ² ½ Ⅷ ٣ 四",
    "before\n\n1. numbered\n  2. lists   3",
    "I'll don't WE'RE it's o'clock 'tis",
    "naïve café — “quotes” … ‚low‘ e\u0301 combining",
    "日本語のテキスト、中文字符,한국어 ไทย العربية עברית हिन्दी",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈 mixed🙂text",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\tpass",
    "\u0000\u0007 control \u200b\u2028\u3000 and \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|><repo_name> not<|im_end|>apart <|im_star",
    "supercalifragilisticexpialidocious" * 5,
    "€" * 50 + "\n" * 50 + "=" * 50,
]
# SmolLM2's vocabulary has no token for these: control characters nobody writes, and parts of characters beyond U+3FFFF.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return load_tokenizer(open_model())


def from_gguf(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def unsplit() -> PreTrainedTokenizerBase:
    """transformers' own loader, which lacks the rule that digits stand apart."""
    return from_gguf(open_model().path)


@pytest.fixture(scope="module")
def theirs(unsplit: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """transformers' with the pre-tokenizer of the model's published tokenizer.json."""
    tokenizer = copy.deepcopy(unsplit)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.backend_tokenizer.pre_tokenizer])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_models_ids_and_texts_equal_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text) == ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_equals_transformers_and_comes_back(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    if not MISSING_BYTES.intersection(text.encode()):
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_bytes_the_vocabulary_lacks_are_dropped(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    for byte in MISSING_BYTES:
        text = f"a{chr(byte)}b"
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("\x06") == [] and ours.decode(ours.encode("a\x06b")) == "ab"


def test_without_digits_transformers_loader_agrees_as_it_is(ours: Tokenizer, unsplit: PreTrainedTokenizerBase) -> None:
    texts = [text for text in TEXTS if not any(character.isnumeric() for character in text)]
    assert len(texts) >= 12
    assert all(ours.encode(text) == unsplit.encode(text) for text in texts)
    assert ours.encode("a\n\n1") != unsplit.encode("a\n\n1")  # the one rule it lacks


def test_any_ids_decode_as_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    for start in range(0, 49152, 1024):  # pieces of characters among them
        ids = list(range(start, start + 1024, 7))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_goldens_prompts_and_outputs(ours: Tokenizer) -> None:
    for name in ("capital", "plain"):
        text = ours.decode(GOLDEN["prompts"][name], skip_special_tokens=False)
        assert ours.encode(text) == GOLDEN["prompts"][name]
    assert text == "The three primary colours are"
    for case in GOLDEN["cases"]:
        assert ours.decode(case["output_ids"], skip_special_tokens=False) == case["text"]


def test_the_chat_template_is_the_files_own(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert ours.chat_template == theirs.chat_template
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.encode(text, add_special_tokens=False) == GOLDEN["prompts"]["capital"]


def test_named_tokens(ours: Tokenizer) -> None:
    assert (ours.bos_token, ours.bos_token_id, ours.eos_token, ours.eos_token_id) == ("<|im_start|>", 1, "<|im_end|>", 2)
    assert ours.vocab_size == open_model().config.shape.vocab_size == 49152
    assert ours.decode([5356, 1, 2, 60_000]) == ours.decode([5356])


def write_tokenizer_gguf(path: Path, pre: str, **extra: bool) -> Path:
    """The start of the default model's vocabulary under another pre-tokenizer's name."""
    source = read_gguf(open_model().path)
    tokens, merges = source.texts("tokenizer.ggml.tokens"), source.texts("tokenizer.ggml.merges")
    num_unmerged = len(tokens) - len(merges)
    tokens, merges = tokens[:6000], merges[: 6000 - num_unmerged]
    assert merges[-1].replace(" ", "") == tokens[-1]
    types = [int(kind) for kind in source.metadata["tokenizer.ggml.token_type"][:6000]]  # type: ignore[index,union-attr]
    types[tokens.index("<file_sep>")] = 4  # found whole, yet not special
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in extra.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_other_pre_tokenizers_equal_transformers(tmp_path: Path, pre: str) -> None:
    path = write_tokenizer_gguf(tmp_path / "tokenizer.gguf", pre, add_add_bos_token=False)
    backend, template, _, _ = read_gguf_tokenizer(path)
    tokenizer, reference = Tokenizer(backend, template, None, None), from_gguf(path)
    texts = [text for text in TEXTS if pre != "qwen2" or "\u0301" not in text]  # published Qwen2 composes (NFC), that loader not
    assert [tokenizer.encode(text) for text in texts] == [reference.encode(text) for text in texts]
    assert tokenizer.encode("x1234", add_special_tokens=False) == reference.encode("x1234")
    kept = tokenizer.decode(tokenizer.encode("a<file_sep>b<|im_end|>"))
    assert kept == "a<file_sep>b" and tokenizer.chat_template is None


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    backend, *_ = read_gguf_tokenizer(write_tokenizer_gguf(tmp_path / "tokenizer.gguf", "qwen2"))
    assert backend.encode("e\u0301").ids == backend.encode("\u00e9").ids


def test_bos_is_added_where_the_file_or_the_kind_says_so(tmp_path: Path) -> None:
    def first(pre: str, **extra: bool) -> int:
        backend, *_ = read_gguf_tokenizer(write_tokenizer_gguf(tmp_path / "tokenizer.gguf", pre, **extra))
        assert backend.encode("hi", add_special_tokens=False).ids[0] != 1
        return backend.encode("hi").ids[0]

    assert first("llama-bpe") == 1 == first("gpt-2", add_add_bos_token=True)
    assert first("llama-bpe", add_add_bos_token=False) != 1 != first("gpt-2")


def test_a_bos_token_that_no_template_can_hold_is_refused() -> None:
    file = read_gguf(open_model().path)
    odd = {"bos_token_id": file.texts("tokenizer.ggml.tokens").index(":"), "add_bos_token": True}
    metadata = file.metadata | {f"tokenizer.ggml.{name}": value for name, value in odd.items()}
    with pytest.raises(InvalidConfig, match="the BOS token ':' cannot be put before a text"):
        _tokenizer(replace(file, metadata=metadata))


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="pre-tokenizer 'viking' is not supported; supported: smollm, gpt-2"):
        read_gguf_tokenizer(write_tokenizer_gguf(tmp_path / "tokenizer.gguf", "viking"))


@pytest.mark.parametrize("vocab_size", [259, 512, 2000])
def test_a_random_models_tokenizer_equals_transformers(tmp_path: Path, vocab_size: int) -> None:
    model = open_model(str(write_random_model(tmp_path, vocab_size=vocab_size)))
    tokenizer, reference = load_tokenizer(model), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == len(reference) <= vocab_size
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text) and max(ids, default=0) < vocab_size
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2) == (model.config.bos_token_id, *model.config.eos_token_ids)
    assert tokenizer.chat_template == reference.chat_template == CHAT_TEMPLATE
    assert vocab_size == 259 or len(tokenizer.encode("the rest is on")) < len("the rest is on")


def test_where_a_folder_keeps_its_chat_template_and_tokens(tmp_path: Path) -> None:
    model = open_model(str(write_random_model(tmp_path)))
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"eos_token": {"content": "<|endoftext|>", "special": True}}
    config |= {"chat_template": [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]}
    path.write_text(json.dumps(config))
    assert (load_tokenizer(model).eos_token_id, load_tokenizer(model).chat_template) == (0, "yes")
    (tmp_path / "chat_template.jinja").write_text("{{ file }}")
    assert load_tokenizer(model).chat_template == "{{ file }}"
    path.unlink()
    assert load_tokenizer(model).eos_token_id is None


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    model = open_model(str(write_random_model(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(model)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidConfig, match=r"has no tokenizer\.json"):
        load_tokenizer(model)


def test_the_bytes_of_tokens_join_to_the_text() -> None:
    tokenizer = load_tokenizer(open_model("smollm2-135m"))
    text = "Zürich 日本語 👩‍👩‍👧 café\n\t 12"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text
    assert any(len(tokenizer.token_bytes(i)) and "\ufffd" in tokenizer.decode([i]) for i in ids)  # halves of characters too
    assert tokenizer.token_bytes(2) == b"<|im_end|>" and tokenizer.token_bytes(10**6) == b""
