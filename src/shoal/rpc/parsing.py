"""Reads the message of a call, and names the field when it cannot be read. Knows the wire format; knows no service."""

from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from shoal.errors import InvalidRequest

_FIXED_BYTES: Final = {1: 8, 5: 4}  # by wire type
_VARINT, _DELIMITED = 0, 2


def read_message(message_class: Any, data: bytes) -> Any:
    """The message. Raises InvalidRequest that names the field whose text is not UTF-8, or the message that this is not."""
    try:
        return message_class.FromString(data)
    except DecodeError:
        path = _broken_text(data, message_class.DESCRIPTOR)
        if path is not None:
            raise InvalidRequest(f"{path} is not valid UTF-8") from None
        raise InvalidRequest(f"the request is no {message_class.DESCRIPTOR.full_name} message") from None


def _broken_text(data: bytes, descriptor: Descriptor) -> str | None:
    """Path of the first string field that is not UTF-8; None when there is none before the bytes stop making sense."""
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            wire_type = key & 7
            if wire_type == _VARINT:
                _, at = _varint(data, at)
                continue
            length, at = _varint(data, at) if wire_type == _DELIMITED else (_FIXED_BYTES[wire_type], at)
            part, at = data[at : at + length], at + length
            field = descriptor.fields_by_number.get(key >> 3)
            if wire_type != _DELIMITED or field is None:
                continue
            if field.type == FieldDescriptor.TYPE_STRING and not _is_text(part):
                return str(field.name)
            if field.message_type is not None and (inner := _broken_text(part, field.message_type)) is not None:
                return f"{field.name}.{inner}"
    except (IndexError, KeyError):
        return None
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
        if shift >= 70:
            raise IndexError


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
