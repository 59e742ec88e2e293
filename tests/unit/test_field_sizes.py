"""Every text and list of the public requests has a bound."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from shoal.errors import InvalidRequest
from shoal.pb.v1 import shoal_pb2
from shoal.router.field_sizes import ELSEWHERE, FIELD_SIZES, check_sizes

ROOTS = (
    shoal_pb2.GenerateRequest, shoal_pb2.ScoreRequest, shoal_pb2.TokenizeRequest, shoal_pb2.DetokenizeRequest,
    shoal_pb2.AbortRequest,
)  # fmt: skip


def sized(message: Descriptor) -> set[str]:
    """The fields whose size the caller chooses, of this message and those in it."""
    found = set()
    for field in message.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            found.add(f"{message.name}.{field.name}")
        if field.message_type is not None and not is_map:
            found |= sized(field.message_type)
    return found


def test_the_table_has_every_text_and_list_and_no_more() -> None:
    assert set().union(*(sized(root.DESCRIPTOR) for root in ROOTS)) == set(FIELD_SIZES)


@pytest.mark.parametrize("root", ROOTS)
def test_each_bound_is_kept(root: type) -> None:
    """Set one field to its limit, then to one more."""
    num_checked = 0
    for field in root.DESCRIPTOR.fields:
        size = FIELD_SIZES.get(f"{root.DESCRIPTOR.name}.{field.name}", ELSEWHERE)
        most = size[0] if isinstance(size, tuple) else size
        if most == ELSEWHERE:
            continue
        item = "x" if field.type == FieldDescriptor.TYPE_STRING else 1
        full, over = ([item] * n if field.is_repeated else item * n for n in (most, most + 1))
        check_sizes(root(**{field.name: full}))
        with pytest.raises(InvalidRequest, match=f"{field.name} has {most + 1} .* send at most {most}"):
            check_sizes(root(**{field.name: over}))
        num_checked += 1
    assert num_checked


def test_the_page_tells_every_bound() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    told: dict[str, str] = {}
    for most, fields in re.findall(r"^\| ([\d,]+(?: entries of [\d,]+ characters)?) \| (`.*`) \|$", page, re.MULTILINE):
        told |= dict.fromkeys(re.findall(r"`([\w.]+)`", fields), most)
    sizes = {name: size for name, size in FIELD_SIZES.items() if size != ELSEWHERE}
    assert told == {
        name: f"{size[0]:,} entries of {size[1]:,} characters" if isinstance(size, tuple) else f"{size:,}"
        for name, size in sizes.items()
    }
