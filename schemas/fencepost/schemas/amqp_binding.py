"""CloudEvents in AMQP 0-9-1: an envelope becomes headers ``ce-*`` and a content type, or one JSON document.

Pure mapping, no broker client. The official binding speaks of AMQP 1.0 only, so writers differ: four prefixes are
read, but never two of them in one message, since a gateway that adds its own could otherwise change an attribute. In
structured mode, told by the content type, the document alone is believed, whatever headers stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from uuid import UUID

from fencepost.schemas import json_format
from fencepost.schemas.content import shown_path
from fencepost.schemas.envelope import (
    CONTENT_TYPE,
    SPECVERSION,
    Envelope,
    from_attributes,
    instant,
    to_attributes,
    wire_type,
)
from fencepost.schemas.errors import Undecodable

__all__ = ["PREFIXES", "Encoder", "decode", "encode", "encode_structured", "encoder"]

PREFIXES = ("ce-", "ce_", "cloudEvents_", "cloudEvents:")
_PREFIX = PREFIXES[0]


Encoder = Callable[
    [UUID | str, str, int, str, str, str, int, bytes, int, datetime | str, Mapping[str, str] | None, str | None],
    dict[str, str],
]
"""id, type, version, tenant, operation, ordering key, epoch, stored digest, sequence, time, attributes, reference."""


def encoder(source: str) -> Encoder:
    """A function for many rows of one source: plain column values to the headers of ``encode``, equal to the last byte."""

    def headers(
        id: UUID | str,
        type: str,
        version: int,
        tenant: str,
        operation: str,
        ordering_key: str,
        epoch: int,
        digest: bytes,
        sequence: int,
        time: datetime | str,
        attributes: Mapping[str, str] | None,
        reference: str | None,
    ) -> dict[str, str]:
        found = {
            "ce-specversion": SPECVERSION,
            "ce-id": str(id),
            "ce-source": source,
            "ce-type": _type(type, version),
            "ce-time": time if isinstance(time, str) else instant(time),
            "ce-partitionkey": ordering_key,
            "ce-sequence": f"{sequence:020}",
            "ce-fptenant": tenant,
            "ce-fpoperation": operation,
            "ce-fpepoch": str(epoch),
            "ce-fpdigest": f"sha256-v1:{digest[1:].hex()}",
        }
        if reference is not None:
            found["ce-fpbinding"] = reference
        if attributes:
            for name in sorted(attributes):
                # AMQP would carry a number as well, and no consumer would read it.
                found[_PREFIX + name] = str.__str__(attributes[name])
        return found

    return headers


def encode(envelope: Envelope) -> tuple[dict[str, str], str]:
    """The headers of ``envelope`` and the content type; the body is ``envelope.payload``."""
    return {_PREFIX + name: value for name, value in to_attributes(envelope).items()}, CONTENT_TYPE


def encode_structured(envelope: Envelope) -> tuple[bytes, str]:
    """The body of ``envelope`` in structured mode and its content type; there are no headers."""
    return json_format.encode(envelope), json_format.STRUCTURED


def decode(headers: Mapping[str, object] | None, content_type: str | None, body: bytes | None) -> Envelope:
    """The envelope of a message in either mode, or Undecodable naming the attribute; headers of others are left alone."""
    if content_type is not None and json_format.is_structured(content_type):
        return json_format.decode(body, content_type)
    attributes: dict[str, str] = {}
    seen: str | None = None
    for header, raw in (headers or {}).items():
        prefix = next((known for known in PREFIXES if header.startswith(known)), None)
        if prefix is None:
            continue
        if seen is not None and prefix != seen:
            raise Undecodable(
                f"headers begin with {seen} and with {prefix}",
                reason="mixed_prefixes",
                field="headers",
                hint="something on the way adds attributes of its own",
            )
        seen = prefix
        name = header[len(prefix) :]
        attributes[name] = _text(raw, name)
    return from_attributes(attributes, content_type, body)


def _text(raw: object, name: str) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, bytes | bytearray):
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Undecodable("a header is not UTF-8", reason="invalid_attribute", field=shown_path((name,))) from None
    raise Undecodable("a header is not a string", reason="invalid_attribute", field=shown_path((name,)))


_type = lru_cache(maxsize=1024)(wire_type)
