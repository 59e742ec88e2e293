"""Text in and out of the router: detokenising, stop strings, chat templates; with the real tokenizer."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files import Tokenizer, load_tokenizer, open_model
from shoal.router.detokenizer import Detokenizer
from shoal.router.output import Answer, OutputToken
from shoal.router.stop_strings import StopMatcher
from shoal.router.text import ChatTemplate, PromptEncoder
from shoal.types import FinishReason, SamplingParams

MIXED = "Zürich 日本語 👩‍👩‍👧 naïve 🏳️‍🌈 𝒳 café\n\t»ß«"


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_model("smollm2-135m"))


token_ids = st.lists(st.integers(0, 49151), max_size=40)
texts = st.text(st.sampled_from("aé日👩 \n0\ufffd") | st.characters(exclude_categories=["Cs"]), max_size=40)


def answer_for(stops: Sequence[str], stop_ids: Sequence[int] = (), **changes: Any) -> Answer:
    sampling = SamplingParams(100, stop=tuple(stops), stop_token_ids=(*stop_ids, 2), **changes)
    return Answer(tokenizer().decode, sampling)


def deltas_of(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer().decode)
    return [detokenizer.push(i) for i in ids]


def without_half_characters(text: str) -> str:
    """Up to three bytes at the end may be waiting for the rest of their character."""
    for _ in range(3):
        text = text.removesuffix("\ufffd")
    return text


@settings(max_examples=200, deadline=None)
@given(token_ids)
def test_any_ids_join_to_the_decoded_text(ids: list[int]) -> None:
    assert "".join(deltas_of(ids)) == without_half_characters(tokenizer().decode(ids))


@settings(max_examples=200, deadline=None)
@given(texts)
def test_any_text_comes_back_whole_and_never_in_half_characters(text: str) -> None:
    known = tokenizer().decode(tokenizer().encode(text))  # the vocabulary lacks a few control bytes
    deltas = deltas_of(tokenizer().encode(text))
    assert "".join(deltas) == without_half_characters(known)
    if "\ufffd" not in known:
        assert all("\ufffd" not in delta for delta in deltas) and "".join(deltas) == known


def test_characters_split_over_tokens_really_occur_here_and_come_whole() -> None:
    ids = tokenizer().encode(MIXED)
    assert any("\ufffd" in tokenizer().decode([i]) for i in ids)  # else this test would prove nothing
    deltas = deltas_of(ids)
    assert "".join(deltas) == MIXED and deltas.count("") > 5
    for cut in range(len(ids)):
        part = "".join(deltas_of(ids[:cut]))
        assert MIXED.startswith(part) and "\ufffd" not in part


def test_what_is_no_text_costs_no_more_than_text() -> None:
    [half] = [i for i in range(256) if tokenizer().token_bytes(i) == b"\x80"]
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return tokenizer().decode(ids)

    detokenizer, shown = Detokenizer(decode), ""
    ids = [half] * 300 + tokenizer().encode("日本 ok") + [half] * 100
    for token_id in ids:
        shown += detokenizer.push(token_id)
    assert shown == without_half_characters(tokenizer().decode(ids)) and max(lengths) < 100


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(range(256)), min_size=70, max_size=200))
def test_long_runs_of_broken_bytes_join_too(ids: list[int]) -> None:
    pool = [i for i in range(3, 259) if tokenizer().token_bytes(i)[:1] >= b"\x80"]  # no byte here is a character of its own
    broken = [pool[i % len(pool)] for i in ids]
    assert "".join(deltas_of(broken)) == without_half_characters(tokenizer().decode(broken))


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character, as a reader would."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab日", max_size=24),
    st.lists(st.text("ab日", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher, shown = StopMatcher(stops), ""
    for start, stop in pairwise(borders):
        shown += matcher.push(text[start:stop])
        expected, matched = reference_stop(text[:stop], stops)
        assert expected.startswith(shown)  # nothing is shown that is not part of the answer
        if matched is not None:
            assert (shown, matcher.matched) == (expected, matched)
            break
    else:
        shown += matcher.finish()
    assert (shown, matcher.matched) == reference_stop(text, stops)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 14), st.booleans())
def test_a_stop_string_counts_where_it_ends_not_where_it_begins(text: str, stops: list[str], first: int, shows: bool) -> None:
    matcher = StopMatcher(stops, shows_stop=shows)
    shown = "".join(matcher.push(char, may_match=index >= first) for index, char in enumerate(text)) + matcher.finish()
    ends = ((end, stop) for end in range(first + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop))
    end, matched = max(((end, stop) for end, stop in ends), key=lambda hit: (-hit[0], len(hit[1])), default=(len(text), None))
    assert matcher.matched == matched
    assert shown == (text[:end] if shows or matched is None else text[: end - len(matched)])


@settings(max_examples=100, deadline=None)
@given(texts, st.data())
def test_a_stop_string_over_token_borders_is_cut_out(text: str, data: st.DataObject) -> None:
    text = tokenizer().decode(tokenizer().encode(text))
    assume(text and "\ufffd" not in text)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    ids = tokenizer().encode(text)
    answer = answer_for([stop])
    shown = ""
    for token_id in ids:
        shown += answer.push([OutputToken(token_id)]).text
    shown += answer.finish(FinishReason.LENGTH).text
    assert shown == answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.matched_stop) == (FinishReason.STOP, stop)
    assert tokenizer().decode(answer.token_ids).find(stop) >= 0 and len(answer.tokens) <= len(ids)
    assert tokenizer().decode(answer.token_ids[:-1]).find(stop) < 0 or not answer.tokens  # it ended as soon as it could


def test_tokens_after_a_stop_string_are_dropped_and_a_stop_token_leaves_no_text() -> None:
    ids = tokenizer().encode("one two three four")
    answer = answer_for(["two"])
    delta = answer.push([OutputToken(i) for i in ids])
    assert (delta.text, len(delta.tokens)) == ("one ", 2) and answer.finish_reason is FinishReason.STOP
    assert not answer.finish(FinishReason.LENGTH) and answer.finish_reason is FinishReason.STOP
    named = tokenizer().encode("!")
    answer = answer_for([], named)
    answer.push([OutputToken(i) for i in [*tokenizer().encode("ok"), *named]])
    answer.finish(FinishReason.STOP, named[0])
    assert (answer.text, answer.token_ids[-1], answer.matched_token_id) == ("ok", named[0], named[0])


def test_text_held_back_for_a_stop_string_is_released_at_the_end() -> None:
    answer = answer_for(["END."])
    shown = answer.push([OutputToken(i) for i in tokenizer().encode("the END")]).text
    assert shown == "the "
    assert answer.finish(FinishReason.LENGTH).text == "END" and answer.text == "the END" and answer.matched_stop is None


def test_the_real_template_renders_as_transformers_renders_it() -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend, chat_template=tokenizer().chat_template,
        bos_token=tokenizer().bos_token, eos_token=tokenizer().eos_token,
    )  # fmt: skip
    encoder = PromptEncoder(tokenizer())
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本 👋"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ):
        expected = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        prompt = encoder.encode_chat(messages)
        assert list(prompt.token_ids) == list(expected)
        tail = tokenizer().decode(prompt.token_ids[-prompt.boundary_tokens :], skip_special_tokens=False)
        assert tail == "<|im_start|>assistant\n" and prompt.boundary_tokens == 4 == encoder.num_generation_tokens


def test_templates_are_sandboxed_and_speak_for_themselves() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", bos_token=None, eos_token=None)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        refusing.render([])
    reaching = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", bos_token=None, eos_token=None)
    with pytest.raises(InvalidRequest):
        reaching.render([])
    with pytest.raises(InvalidConfig, match="cannot be read"):
        ChatTemplate("{% if %}", bos_token=None, eos_token=None)
    dated = ChatTemplate("{{ bos_token }}{{ strftime_now('%Y') }}{{ messages | tojson }}", bos_token="<s>", eos_token=None)
    assert dated.render([{"role": "user", "content": "é"}])[:5] == "<s>20"


def test_without_a_template_chat_is_unsupported() -> None:
    bare = Tokenizer(tokenizer().backend, None, None, None)
    with pytest.raises(Unsupported, match="no chat template"):
        PromptEncoder(bare).encode_chat([{"role": "user", "content": "Hi"}])
    assert PromptEncoder(bare).encode_text("Hi").boundary_tokens == 1


def test_a_template_without_a_generation_prompt_has_boundary_one() -> None:
    plain = Tokenizer(tokenizer().backend, "{% for m in messages %}{{ m.content }}{% endfor %}", None, None)
    assert PromptEncoder(plain).encode_chat([{"role": "user", "content": "Hi there"}]).boundary_tokens == 1
