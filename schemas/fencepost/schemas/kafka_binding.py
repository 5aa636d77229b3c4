"""CloudEvents in Kafka: an envelope becomes headers ``ce_*``, a key and the unchanged payload, or one JSON document.

Pure mapping, no broker client. What is read tells its mode by the content type; in structured mode the document alone
is believed, whatever headers stand beside it. The key is the JSON array [tenant, ordering key], so that compaction can never
merge two tenants; the value is never empty, so that no event can become a tombstone.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from json.encoder import encode_basestring as _quoted
from typing import Protocol
from uuid import UUID

from fencepost.schemas import json_format
from fencepost.schemas.content import shown_path
from fencepost.schemas.envelope import (
    CONTENT_TYPE,
    REQUIRED,
    SPECVERSION,
    Envelope,
    from_attributes,
    instant,
    wire_type,
)
from fencepost.schemas.errors import Undecodable

__all__ = ["STRUCTURED_HEADERS", "Encoder", "Header", "decode", "encode", "encode_structured", "encoder", "key"]

Header = tuple[str, bytes]

STRUCTURED_HEADERS: tuple[Header, ...] = (("content-type", json_format.STRUCTURED.encode()),)
"""The headers of every message in structured mode."""

_PREFIX = "ce_"
_NAMES = {f"{_PREFIX}{name}": name for name in REQUIRED}
_CONTENT_TYPE = "content-type"


class Encoder(Protocol):
    """Plain column values to headers; ``digest`` is the stored 33 bytes, a ``time`` that is text is sent as it is."""

    def __call__(
        self,
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
        attributes: Mapping[str, str] | None = None,
        reference: str | None = None,
    ) -> list[Header]: ...


def encoder(source: str) -> Encoder:
    """A function for many rows of one source; its headers are equal, byte for byte, to those of ``encode``."""
    first = (_CONTENT_TYPE, CONTENT_TYPE.encode())
    second = (f"{_PREFIX}specversion", SPECVERSION.encode())
    third = (f"{_PREFIX}source", source.encode())

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
        attributes: Mapping[str, str] | None = None,
        reference: str | None = None,
    ) -> list[Header]:
        of_type, of_tenant, of_epoch = _recurring(type, version, tenant, epoch)
        found = [
            first,
            second,
            third,
            ("ce_id", str(id).encode()),
            of_type,
            ("ce_time", (time if isinstance(time, str) else instant(time)).encode()),
            ("ce_partitionkey", ordering_key.encode()),
            ("ce_sequence", b"%020d" % sequence),
            of_tenant,
            ("ce_fpoperation", operation.encode()),
            of_epoch,
            ("ce_fpdigest", b"sha256-v1:" + hexlify(digest[1:])),
        ]
        if reference is not None:
            found.append(("ce_fpbinding", reference.encode()))
        if attributes:
            found.extend((_PREFIX + name, attributes[name].encode()) for name in sorted(attributes))
        return found

    return headers


def encode(envelope: Envelope) -> list[Header]:
    """The headers of ``envelope``, in a fixed order; the value is ``envelope.payload``, the key ``key(...)``."""
    return _encoder(envelope.source)(
        envelope.id,
        envelope.type,
        envelope.version,
        envelope.tenant,
        envelope.operation,
        envelope.ordering_key,
        envelope.epoch,
        envelope.digest.raw,
        envelope.sequence,
        envelope.time,
        envelope.attributes,
        envelope.reference,
    )


def encode_structured(envelope: Envelope) -> tuple[list[Header], bytes]:
    """Headers and value of ``envelope`` in structured mode; the key is the same ``key(...)``."""
    return list(STRUCTURED_HEADERS), json_format.encode(envelope)


def key(tenant: str, ordering_key: str) -> bytes:
    """The canonical JSON array [tenant, ordering key]: equal for equal pairs, and for no others."""
    return f"[{_quoted(tenant)},{_quoted(ordering_key)}]".encode()


def decode(
    headers: Iterable[tuple[str, str | bytes | None]] | None, key: bytes | None, value: bytes | None
) -> Envelope:
    """The envelope of a message in either mode, or Undecodable naming the attribute; headers of others are left alone.

    A present key must be the one this envelope gets, or the bare ordering key, as the mapping of CloudEvents has it; a
    message without a key is accepted.
    """
    found = headers if isinstance(headers, list) else list(headers or ())
    content_type: str | None = None
    for header, raw in found:
        if len(header) == 12 and header.lower() == _CONTENT_TYPE:
            if content_type is not None:
                raise _duplicate("datacontenttype")
            content_type = _text(raw, "datacontenttype")
    if content_type is not None and json_format.is_structured(content_type):
        envelope = json_format.decode(value, content_type)
    else:
        attributes = _attributes(found)
        if content_type is not None and attributes.get("datacontenttype") == content_type:
            del attributes["datacontenttype"]  # some writers say it twice
        envelope = from_attributes(attributes, content_type, value)
    if key is not None and key not in (_key(envelope.tenant, envelope.ordering_key), envelope.ordering_key.encode()):
        raise Undecodable("the key is not [tenant, ordering key]", reason="wrong_key", field="key")
    return envelope


def _attributes(headers: Iterable[tuple[str, str | bytes | None]]) -> dict[str, str]:
    attributes: dict[str, str] = {}
    for header, raw in headers:
        name = _NAMES.get(header)
        if name is None:
            if not header.startswith(_PREFIX):
                continue
            name = header[len(_PREFIX) :]
        if name in attributes:
            raise _duplicate(name)
        try:
            attributes[name] = raw.decode() if type(raw) is bytes else _text(raw, name)
        except UnicodeDecodeError:
            raise _not_utf8(name) from None
    return attributes


def _duplicate(name: str) -> Undecodable:
    return Undecodable("a header occurs twice", reason="duplicate_attribute", field=shown_path((name,)))


def _text(raw: str | bytes | None, name: str) -> str:
    if raw is None:
        raise Undecodable("a header has no value", reason="invalid_attribute", field=shown_path((name,)))
    if isinstance(raw, str):
        return raw
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _not_utf8(name) from None


def _not_utf8(name: str) -> Undecodable:
    return Undecodable("a header is not UTF-8", reason="invalid_attribute", field=shown_path((name,)))


@lru_cache(maxsize=1024)
def _recurring(type: str, version: int, tenant: str, epoch: int) -> tuple[Header, Header, Header]:
    """What many events have in common."""
    return (
        ("ce_type", wire_type(type, version).encode()),
        ("ce_fptenant", tenant.encode()),
        ("ce_fpepoch", b"%d" % epoch),
    )


_encoder: Callable[[str], Encoder] = lru_cache(maxsize=16)(encoder)
_key = key
