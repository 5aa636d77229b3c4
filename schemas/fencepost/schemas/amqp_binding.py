"""CloudEvents in AMQP 0-9-1, binary mode: an envelope becomes headers ``ce-*`` and a content type.

Pure mapping, no broker client. The official binding speaks of AMQP 1.0 only, so writers differ: four prefixes are
read, but never two of them in one message, since a gateway that adds its own could otherwise change an attribute.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.schemas.content import shown_path
from fencepost.schemas.envelope import CONTENT_TYPE, Envelope, from_attributes, to_attributes
from fencepost.schemas.errors import Undecodable

__all__ = ["PREFIXES", "decode", "encode"]

PREFIXES = ("ce-", "ce_", "cloudEvents_", "cloudEvents:")
_PREFIX = PREFIXES[0]


def encode(envelope: Envelope) -> tuple[dict[str, str], str]:
    """The headers of ``envelope`` and the content type; the body is ``envelope.payload``."""
    return {_PREFIX + name: value for name, value in to_attributes(envelope).items()}, CONTENT_TYPE


def decode(headers: Mapping[str, object] | None, content_type: str | None, body: bytes | None) -> Envelope:
    """The envelope of a message, or Undecodable naming the attribute; headers of others are left alone."""
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
