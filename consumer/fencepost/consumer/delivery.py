"""One arrival at a consumer, the same for every broker, with coordinates that no other arrival has.

Coordinates are a JSON array: ``["kafka", cluster id, topic, topic id, partition, offset]`` or
``["rabbitmq", cluster name, virtual host, queue, message id]``. They name the delivery, never the operation.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, Self, assert_never, cast

from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import FencepostError, InvalidInput

__all__ = ["COORDINATES_CHARS_MAX", "Delivery"]

COORDINATES_CHARS_MAX = 1500
# What a broker adds or changes at every arrival is no part of the message's name.
_PER_ARRIVAL = frozenset(
    {"x-delivery-count", "x-acquired-count", "x-death", "x-first-death-exchange", "x-first-death-queue"}
)
_MESSAGE_ID = re.compile(r"[\x21-\x7e]{1,200}\Z")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_NESTING_MAX = 8

# What a broker adds or changes from one delivery of a message to the next; not part of the message.
_DELIVERY_HEADERS = re.compile(r"x-(?:delivery-count|acquired-count|death|first-death-.*|last-death-.*)\Z")


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it arrived: bytes unchanged, nothing decoded, nothing of it shown by ``repr``."""

    broker: Literal["kafka", "rabbitmq"]
    coordinates: str
    headers: tuple[tuple[str, object], ...] = field(repr=False)
    key: bytes | None = field(repr=False)
    body: bytes = field(repr=False)
    content_type: str | None = None
    redelivered: bool = False
    dead_letter: int | None = None
    """The number of the dead letter that this was made from, when an operator gave it back."""

    def __post_init__(self) -> None:
        if not self.coordinates or len(self.coordinates) > COORDINATES_CHARS_MAX:
            raise InvalidInput(
                f"coordinates have {len(self.coordinates)} characters, 1 to {COORDINATES_CHARS_MAX} are allowed",
                field="coordinates",
                hint="name broker, place and message",
            )
        if "\0" in self.coordinates:
            raise InvalidInput(
                "coordinates hold a NUL",
                field="coordinates",
                hint="take from_kafka, from_rabbitmq, or JSON of your own",
            )

    @classmethod
    def from_kafka(
        cls,
        *,
        cluster_id: str,
        topic: str,
        partition: int,
        offset: int,
        headers: Iterable[tuple[str, str | bytes | None]] | None,
        key: bytes | None,
        value: bytes | None,
        topic_id: str = "",
    ) -> Self:
        """A Kafka record; ``topic_id`` tells a topic from an earlier one of its name, where the broker offers it."""
        return cls(
            broker="kafka",
            coordinates=json.dumps(["kafka", cluster_id, topic, topic_id, partition, offset]),
            headers=tuple(headers or ()),
            key=key,
            body=value or b"",
        )

    @classmethod
    def from_rabbitmq(
        cls,
        *,
        cluster: str,
        vhost: str,
        queue: str,
        message_id: str | None,
        headers: Mapping[str, object] | None,
        content_type: str | None,
        body: bytes,
        redelivered: bool = False,
    ) -> Self:
        """An AMQP message; one without a usable ``message_id`` is named by the hash of its headers and body."""
        if message_id is None or _MESSAGE_ID.match(message_id) is None:
            kept = sorted((name, str(value)) for name, value in (headers or {}).items() if name not in _PER_ARRIVAL)
            named = json.dumps(kept).encode()
            message_id = f"sha256:{sha256(b'%d:%b%b' % (len(named), named, body)).hexdigest()}"
        return cls(
            broker="rabbitmq",
            coordinates=json.dumps(["rabbitmq", cluster, vhost, queue, message_id]),
            headers=tuple((headers or {}).items()),
            key=None,
            body=body,
            content_type=content_type,
            redelivered=redelivered,
        )

    @classmethod
    def from_dead_letter(cls, number: int, coordinates: str, headers: list[list[object]], payload: bytes) -> Self:
        """The delivery that was kept: read again it is what it was, and kept again it is stored the same.

        Raises InvalidInput for coordinates of no broker, which only callers with a transaction of their own have.
        """
        broker: object = None
        with suppress(ValueError):
            broker = json.loads(coordinates)[0]
        if broker not in ("kafka", "rabbitmq"):
            raise InvalidInput("the dead letter is of no broker", field="coordinates", hint="have it delivered again")
        kept = [(str(name), _restored(value)) for name, value in headers]
        key: object = None
        content_type: object = None
        if kept and kept[0][0] == ":key":
            key = kept.pop(0)[1]
        if kept and kept[0][0] == ":content-type":
            content_type = kept.pop(0)[1]
        return cls(
            broker="kafka" if broker == "kafka" else "rabbitmq",
            coordinates=coordinates,
            headers=tuple(kept),
            key=key.encode() if isinstance(key, str) else key if isinstance(key, bytes) else None,
            body=payload,
            content_type=content_type if isinstance(content_type, str) else None,
            redelivered=True,
            dead_letter=number,
        )

    def envelope(self) -> Envelope:
        """The envelope of this delivery, or Undecodable naming the attribute; the digest is not verified here."""
        match self.broker:
            case "kafka":
                headers = cast(tuple[tuple[str, str | bytes | None], ...], self.headers)
                return kafka_binding.decode(headers, self.key, self.body)
            case "rabbitmq":
                return amqp_binding.decode(dict(self.headers), self.content_type, self.body)
            case _:
                assert_never(self.broker)

    @property
    def order(self) -> bytes:
        """What is equal for deliveries whose order must be kept: the record's key, else tenant and ordering key.

        Empty for what has neither, such as a message that cannot be read: those keep their order among each other.
        """
        if self.key is not None:
            return self.key
        try:
            read = self.envelope()
        except FencepostError:
            return b""
        return kafka_binding.key(read.tenant, read.ordering_key)

    def stored_headers(self) -> list[list[object]]:
        """Headers as PostgreSQL can store them, in order: [name, value]; unstorable text as ``{"base64": ...}``.

        The key and the content type stand first under ``:key`` and ``:content-type``; what the broker adds to a
        single delivery is left out, so that copies of a message are stored alike.
        """
        found: list[list[object]] = []
        if self.key is not None:
            found.append([":key", _stored(self.key)])
        if self.content_type is not None:
            found.append([":content-type", _stored(self.content_type)])
        found.extend(
            [_stored(name), _stored(value)] for name, value in self.headers if _DELIVERY_HEADERS.match(name) is None
        )
        return found


def _restored(value: object) -> object:
    if isinstance(value, dict):
        encoded = cast(dict[str, object], value).get("base64")
        return base64.b64decode(encoded) if isinstance(encoded, str) else None
    if isinstance(value, list):
        return [_restored(item) for item in cast(list[object], value)]
    return value


def _stored(value: object, depth: int = 0) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, bytes | bytearray):
        try:
            text = bytes(value).decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
        return _stored(text, depth)
    if isinstance(value, str):
        if _UNSTORABLE.search(value) is None:
            return value
        return {"base64": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii")}
    if depth < _NESTING_MAX and isinstance(value, Mapping):
        members = cast(Mapping[object, object], value)
        return [[_stored(str(name)), _stored(item, depth + 1)] for name, item in members.items()]
    if depth < _NESTING_MAX and isinstance(value, list | tuple):
        return [_stored(item, depth + 1) for item in cast(list[object], value)]
    return _stored(str(value), depth)
