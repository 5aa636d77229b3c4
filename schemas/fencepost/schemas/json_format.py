"""CloudEvents in structured mode: a whole event as one JSON document, and back to the very payload that went in.

The payload stands in ``data`` as it is, byte for byte, and is cut out again as it is: no number, escape or member
order changes on the way. A payload that is no JSON of the profile, or has white space around it, travels as
``data_base64`` instead, so no event is unfit for this mode. What the private member holds travels as in binary mode.
Others may write the document anew: then the bytes of ``data`` differ, the binding (of the canonical form) does not.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from fencepost.schemas import content
from fencepost.schemas.content import shown_path
from fencepost.schemas.envelope import CONTENT_TYPE, Envelope, from_attributes, to_attributes
from fencepost.schemas.errors import Undecodable

__all__ = ["BODY_BYTES_MAX", "STRUCTURED", "body", "decode", "encode", "is_structured"]

STRUCTURED: Final = "application/cloudevents+json; charset=utf-8"
"""The content type of what ``encode`` gives."""

BODY_BYTES_MAX = 3 * 1024 * 1024
"""More than any acceptable event takes: 1 MiB of payload in base64, and its attributes with every character escaped."""

_MEDIA_TYPE = "application/cloudevents+json"
_INT32 = 2**31
_SPACE = b" \t\r\n"
_JSON = json.JSONDecoder()


def is_structured(content_type: str | None) -> bool:
    """Whether the whole event is in the body, in the JSON format; a batch or another format is not."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() == _MEDIA_TYPE


def encode(envelope: Envelope) -> bytes:
    """The document of ``envelope``: equal envelopes give equal bytes."""
    return body(to_attributes(envelope), envelope.payload)


def body(attributes: Mapping[str, str], payload: bytes) -> bytes:
    """The document of these attributes, in their order, and this payload."""
    named = json.dumps({**attributes, "datacontenttype": CONTENT_TYPE}, ensure_ascii=False, separators=(",", ":"))
    if _fits(payload):
        return b'%b,"data":%b}' % (named[:-1].encode(), payload)
    return b'%b,"data_base64":"%b"}' % (named[:-1].encode(), b64encode(payload))


def decode(raw: bytes | None, content_type: str) -> Envelope:
    """The envelope in a document, or Undecodable naming the attribute; ``null`` is the same as absent."""
    _check_charset(content_type)
    if not raw:
        raise Undecodable("the message is empty", reason="empty_payload", field="data")
    text = content.text_of(raw, limit=BODY_BYTES_MAX)
    attributes: dict[str, str] = {}
    payload: bytes | None = None
    seen: set[str] = set()
    for name, value, written in _members(text):
        if name in seen:
            raise Undecodable("a member occurs twice", reason="duplicate_attribute", field=shown_path((name,)))
        seen.add(name)
        if value is None:
            continue
        if name not in ("data", "data_base64"):
            attributes[name] = _attribute(name, value)
        elif payload is not None:
            raise Undecodable("both data and data_base64 are there", reason="duplicate_attribute", field="data_base64")
        else:
            payload = written.encode() if name == "data" else _binary(value)
    found = from_attributes(attributes, attributes.pop("datacontenttype", CONTENT_TYPE), payload)
    return replace(found, body=raw)


def _fits(payload: bytes) -> bool:
    """Whether the payload can stand in a document as it is, and nothing in it can pass for another attribute."""
    if payload[:1] in _SPACE or payload[-1:] in _SPACE:
        return False
    try:
        content.decode(payload)
    except Undecodable:
        return False
    return True


def _check_charset(content_type: str) -> None:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "us-ascii"):
            raise Undecodable("only UTF-8 is read", reason="unsupported_content_type", field="datacontenttype")


def _members(text: str) -> Iterator[tuple[str, object, str]]:
    """Name, value, and the value as it is written, of every member of the object that ``text`` is known to be."""
    at = _past_space(text, 0)
    if text[at] != "{":
        raise Undecodable("the document is not a JSON object", reason="not_an_object")
    at = _past_space(text, at + 1)
    while text[at] != "}":
        name, at = _value(text, at)
        start = _past_space(text, _past_space(text, at) + 1)
        value, at = _value(text, start)
        yield cast(str, name), value, text[start:at]
        at = _past_space(text, at)
        if text[at] == ",":
            at = _past_space(text, at + 1)


def _value(text: str, at: int) -> tuple[object, int]:
    try:
        return cast(tuple[object, int], _JSON.raw_decode(text, at))
    except (ValueError, RecursionError):  # pragma: no cover  # the text has been read once before
        raise Undecodable("the document is not acceptable JSON", reason="malformed_json") from None


def _past_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _attribute(name: str, value: Any) -> str:
    """The canonical text of an attribute, as it would stand in a header."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case int() if -_INT32 <= value < _INT32:
            return str(value)
        case _:
            raise Undecodable(
                "an attribute is not a string, a boolean or an integer of 32 bits",
                reason="invalid_attribute",
                field=shown_path((name,)),
            )


def _binary(value: object) -> bytes:
    try:
        return b64decode(cast(str, value), validate=True)
    except (ValueError, TypeError):
        raise Undecodable("data_base64 is not base64", reason="invalid_attribute", field="data_base64") from None
