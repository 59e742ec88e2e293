"""The visibility value object: text round trip, resolution, and a clear error for everything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.visibility import PromptSplit, Visibility, VisibilityKind

numbers = st.integers(1, 999_999_999)


@st.composite
def visibilities(draw: st.DrawFn) -> Visibility:
    kind = draw(st.sampled_from(VisibilityKind))
    boundary = draw(st.none() | numbers)
    match kind:
        case VisibilityKind.FULL:
            return Visibility(boundary_tokens=boundary)
        case VisibilityKind.SPEED:
            anchors = draw(st.integers(0, 999_999_999))
            return Visibility(kind, draw(numbers), anchor_tokens=anchors, boundary_tokens=boundary, sink=draw(st.booleans()))
        case VisibilityKind.POP:
            return Visibility(kind, draw(numbers), boundary_tokens=boundary, late=draw(st.booleans()))


@given(visibilities())
def test_text_round_trip(visibility: Visibility) -> None:
    assert Visibility.parse(str(visibility)) == visibility
    assert str(Visibility.parse(str(visibility))) == str(visibility)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", Visibility()),
        ("full:boundary=3", Visibility(boundary_tokens=3)),
        ("speed:22", Visibility(VisibilityKind.SPEED, 22, anchor_tokens=1)),
        ("speed:22:anchors=0", Visibility(VisibilityKind.SPEED, 22)),
        ("speed:22:anchors=4:boundary=8", Visibility(VisibilityKind.SPEED, 22, anchor_tokens=4, boundary_tokens=8)),
        ("speed:22:anchors=4:sink", Visibility(VisibilityKind.SPEED, 22, anchor_tokens=4, sink=True)),
        ("pop:20", Visibility(VisibilityKind.POP, 20)),
        ("pop:20:late", Visibility(VisibilityKind.POP, 20, late=True)),
        ("pop:20:late:boundary=2", Visibility(VisibilityKind.POP, 20, late=True, boundary_tokens=2)),
    ],
)
def test_every_form(text: str, expected: Visibility) -> None:
    assert Visibility.parse(text) == expected and str(expected) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("  speed:22\n", "speed:22"),
        ("speed:022:anchors=01", "speed:22"),
        ("speed:22:boundary=2:sink:anchors=3", "speed:22:anchors=3:sink:boundary=2"),
        ("pop:4:boundary=2:late", "pop:4:late:boundary=2"),
    ],
)
def test_order_and_zeros_do_not_matter(text: str, canonical: str) -> None:
    assert str(Visibility.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown visibility ''; accepted: full, speed:K"),
        ("fast:3", "unknown visibility 'fast:3'"),
        ("SPEED:3", "unknown visibility 'SPEED:3'"),
        ("speed :3", "unknown visibility"),
        ("speed", "needs a prefill depth, as in 'speed:22'"),
        ("pop:", "needs a prefill depth, as in 'pop:22'"),
        ("pop:late", "needs a prefill depth, as in 'pop:22'"),
        ("speed:anchors=1", "needs a prefill depth"),
        ("speed:-1", "needs a prefill depth"),
        ("speed: 3", "needs a prefill depth"),
        ("speed:3.0", "needs a prefill depth"),
        ("speed:٣", "needs a prefill depth"),  # an Arabic-Indic digit
        ("speed:²", "needs a prefill depth"),
        ("speed:1_0", "needs a prefill depth"),
        ("speed:0", "K >= 1"),
        ("pop:0", "K >= 1"),
        ("speed:1234567890", "1234567890 is too large; numbers go up to 999999999"),
        ("full:22", "'full' runs every layer and takes no prefill depth"),
        ("full:late", "full does not take 'late'"),
        ("full:sink", "full does not take 'sink'"),
        ("pop:3:anchors=1", "pop does not take 'anchors'"),
        ("pop:3:anchors=0", "pop does not take 'anchors'"),
        ("pop:3:sink", "pop does not take 'sink'"),
        ("speed:3:late", "speed does not take 'late'"),
        ("speed:3:boundary=0", "boundary must be 1 or more"),
        ("speed:3:boundary=-1", "'boundary' needs a whole number, as in 'boundary=4'"),
        ("speed:3:boundary", "'boundary' needs a whole number"),
        ("speed:3:boundary=", "'boundary' needs a whole number"),
        ("speed:3:anchors=1 ", None),  # blanks at the very end are dropped …
        ("speed:3:anchors=1 :sink", "'anchors' needs a whole number"),  # … but not inside
        ("speed:3:anchors=１", "'anchors' needs a whole number"),  # a full-width digit
        ("speed:3:anchors=12345678901", "is too large"),
        ("speed:3:sink=1", "'sink' takes no value"),
        ("pop:3:late:late", "gives 'late' twice"),
        ("speed:3:anchors=1:anchors=1", "gives 'anchors' twice"),
        ("speed:3:", "cannot read ''"),
        ("speed:3:4", "cannot read '4'"),
        ("speed:3:anchor=4", "cannot read 'anchor=4'"),
        ("speed:3:" + "x" * 500, "visibility of 508 characters"),
    ],
)
def test_bad_text_is_refused_with_words(text: str, message: str | None) -> None:
    if message is None:
        assert str(Visibility.parse(text)) == "speed:3"
        return
    with pytest.raises(InvalidRequest) as caught:
        Visibility.parse(text)
    assert message in str(caught.value)


@given(st.text(alphabet="fulspedo:=0123456789 lateankcyi٣", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        visibility = Visibility.parse(text)
    except InvalidRequest as error:
        assert str(error)
    else:
        assert Visibility.parse(str(visibility)) == visibility


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_layers": 3},
        {"kind": VisibilityKind.SPEED},
        {"kind": VisibilityKind.POP, "prefill_layers": 0},
        {"kind": VisibilityKind.SPEED, "prefill_layers": 3, "anchor_tokens": -1},
        {"kind": VisibilityKind.SPEED, "prefill_layers": 3, "late": True},
        {"kind": VisibilityKind.POP, "prefill_layers": 3, "anchor_tokens": 1},
        {"kind": VisibilityKind.POP, "prefill_layers": 3, "sink": True},
        {"late": True},
        {"boundary_tokens": 0},
        {"boundary_tokens": 1_000_000_000},
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Visibility(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "default", "resolved"),
    [
        ("full", 5, "full:boundary=1"),
        ("full:boundary=7", 5, "full:boundary=7"),
        ("speed:22", 5, "speed:22:boundary=5"),  # a chat template's generation prompt
        ("speed:22", 0, "speed:22:boundary=1"),
        ("speed:22:boundary=2", 5, "speed:22:boundary=2"),
        ("pop:22", 5, "pop:22:boundary=1"),
        ("pop:22:late", 5, "pop:22:late:boundary=1"),
        ("speed:30:anchors=4:sink", 5, "full:boundary=1"),  # K = L
        ("speed:30:boundary=3", 5, "full:boundary=3"),
        ("pop:30:late", 5, "full:boundary=1"),
        ("speed:1", 1, "speed:1:boundary=1"),
    ],
)
def test_resolution(text: str, default: int, resolved: str) -> None:
    visibility = Visibility.parse(text).resolve(30, default)
    assert str(visibility) == resolved
    assert visibility.resolve(30, 99) == visibility, "resolving twice changes nothing"


def test_too_deep_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'speed:31': prefill depth 31 exceeds the model's 30 layers"):
        Visibility.parse("speed:31").resolve(30)


def test_policy_drops_the_boundary_only() -> None:
    visibility = Visibility.parse("speed:22:anchors=4:sink:boundary=8")
    assert str(visibility.policy) == "speed:22:anchors=4:sink"
    assert str(Visibility.parse("pop:20:late:boundary=8").policy) == "pop:20:late"


@pytest.mark.parametrize(
    ("text", "num_prompt", "split"),
    [
        ("speed:2:boundary=1", 1, PromptSplit(1, 0, 0)),
        ("speed:2:boundary=4", 4, PromptSplit(4, 0, 0)),
        ("speed:2:boundary=9", 4, PromptSplit(4, 0, 0)),  # N < b
        ("speed:2:anchors=9:boundary=2", 6, PromptSplit(6, 4, 4)),  # a > P
        ("speed:2:anchors=0:boundary=2", 6, PromptSplit(6, 4, 0)),
        ("pop:2:boundary=2", 6, PromptSplit(6, 4, 0)),
        ("full:boundary=2", 6, PromptSplit(6, 4, 0)),
    ],
)
def test_split(text: str, num_prompt: int, split: PromptSplit) -> None:
    assert Visibility.parse(text).split(num_prompt) == split


def test_an_unresolved_visibility_does_not_split() -> None:
    with pytest.raises(ValueError, match="resolve"):
        Visibility.parse("speed:2").split(6)
