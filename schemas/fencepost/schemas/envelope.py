"""The envelope: one event as CloudEvents 1.0.2, the same attributes on every broker.

Own attributes: ``partitionkey`` (ordering key), ``sequence`` (row number, 20 digits), ``fptenant``, ``fpoperation``,
``fpepoch``, ``fpdigest``, and ``fpbinding`` when the domain vouches for a reference instead of the content. The wire
``type`` is name + ``.v`` + version. All values are strings, so 64-bit numbers survive every intermediary. Delivery
ids never appear: copies of an event are byte-identical, but for ``fpreplayed`` = ``true`` on those that an operator had
sent again; it is no part of identity, digest or payload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Final
from uuid import UUID

from fencepost.schemas import content
from fencepost.schemas.digest import Digest
from fencepost.schemas.digest import digest as digest_of
from fencepost.schemas.digest import meaning as meaning_of
from fencepost.schemas.errors import InvalidInput, Undecodable
from fencepost.schemas.identity import (
    INT64_MAX,
    as_operation,
    as_ordering_key,
    as_source,
    as_tenant,
    as_type,
    as_version,
    forbidden_character,
)

__all__ = [
    "ATTRIBUTES_MAX",
    "ATTRIBUTE_BYTES_MAX",
    "CONTENT_TYPE",
    "EVENT_BYTES_MAX",
    "OWN_ATTRIBUTES",
    "REPLAYED",
    "REQUIRED",
    "SPECVERSION",
    "Envelope",
    "from_attributes",
    "instant",
    "to_attributes",
    "validate_attributes",
    "validate_size",
    "wire_type",
]

SPECVERSION: Final = "1.0"
CONTENT_TYPE: Final = "application/json"
REPLAYED: Final = "fpreplayed"
"""The declared delivery attribute of a copy that was sent again from the retained outbox; its value is ``true``."""

ATTRIBUTES_MAX = 16
ATTRIBUTE_BYTES_MAX = 2048
EVENT_BYTES_MAX = 1024 * 1024
"""Payload and optional attributes together; the fixed attributes add at most about 4 KiB."""

OWN_ATTRIBUTES = frozenset(
    {"specversion", "id", "source", "type", "time", "datacontenttype", "data", "partitionkey", "sequence"}
)
"""Names that users' attributes may not take; so is everything that begins with ``fp``."""

_NAME = re.compile(r"[a-z0-9]{1,20}\Z")
_FOREIGN_NAME = re.compile(r"[a-z0-9]{1,64}\Z")
_FOREIGN_MAX = 64
REQUIRED = (
    "specversion",
    "id",
    "source",
    "type",
    "time",
    "partitionkey",
    "sequence",
    "fptenant",
    "fpoperation",
    "fpepoch",
    "fpdigest",
)
"""The attributes of every event; all of them are strings."""
_TAKEN = frozenset(REQUIRED) | {"fpbinding"}
_WIRE_TYPE = re.compile(r"(.+)\.v([1-9][0-9]{0,4})\Z")
_SEQUENCE = re.compile(r"[0-9]{20}\Z")
_EPOCH = re.compile(r"(?:0|[1-9][0-9]{0,18})\Z")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:\d\d)\Z", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\Z")
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Envelope:
    """One event with everything that travels; ``payload`` is never changed and never shown.

    Not validated here: the relay builds it from rows that ``enqueue`` accepted, consumers through ``decode``.
    """

    id: UUID
    source: str
    type: str
    version: int
    tenant: str
    operation: str
    ordering_key: str
    epoch: int
    digest: Digest
    sequence: int
    time: datetime
    payload: bytes = field(repr=False)
    attributes: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    reference: str | None = field(default=None, repr=False)
    """The ``ref:`` binding, or None when the binding is that of the content."""
    content_type: str = CONTENT_TYPE
    body: bytes | None = field(default=None, repr=False, compare=False)
    """The whole message, where the payload arrived as a part of it (structured mode)."""
    _decoded: content.JsonObject | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def replayed(self) -> bool:
        """True when this copy was sent again from the retained outbox; projections may care, the inbox does not."""
        return self.attributes.get(REPLAYED) == "true"

    @property
    def binding(self) -> str:
        """The domain's reference, else computed from the payload; raises Undecodable."""
        return self.reference if self.reference is not None else content.binding_of(self.decoded())

    def decoded(self) -> content.JsonObject:
        """The payload as `content.decode` reads it, read once; not to be changed. Raises Undecodable."""
        if self._decoded is None:
            object.__setattr__(self, "_decoded", content.decode(self.payload))
        assert self._decoded is not None
        return self._decoded

    @property
    def meaning(self) -> Digest:
        """Computed anew from identity and binding; raises Undecodable if the payload cannot be read."""
        return self._meaning(self.binding)

    def _meaning(self, binding: str) -> Digest:
        return meaning_of(self.tenant, self.operation, self.type, self.version, binding)

    def verify(self) -> Digest:
        """Recompute binding, meaning and digest; the meaning, or Undecodable ``digest_mismatch``."""
        return self._meaning(self.check())

    def check(self) -> str:
        """Recompute binding and digest; the binding, or Undecodable ``digest_mismatch``."""
        binding = self.binding
        expected = digest_of(self.tenant, self.operation, self.type, self.version, self.epoch, binding)
        if expected.raw != self.digest.raw:
            raise Undecodable(
                "the digest does not belong to this identity and content",
                reason="digest_mismatch",
                field="fpdigest",
                hint="the event was changed on its way, or its producer computes another binding",
            )
        return binding


def validate_attributes(attributes: Mapping[str, str], *, limit: int = ATTRIBUTES_MAX) -> dict[str, str]:
    """A producer's optional attributes as a new dict sorted by name, or InvalidInput naming the attribute.

    At most ``limit`` names of 1 to 20 letters a-z and digits; values of 1 to 2048 bytes without control characters.
    """
    if len(attributes) > limit:
        raise InvalidInput(f"{len(attributes)} attributes, at most {limit} are allowed", field="attributes")
    for name in attributes:
        if type(name) is not str or _NAME.match(name) is None:
            raise InvalidInput(
                "an attribute name is 1 to 20 of a-z and 0-9", field="attributes", hint="CloudEvents allows no other"
            )
        if name in OWN_ATTRIBUTES or name.startswith("fp"):
            raise InvalidInput(f"the attribute {name} is set by the envelope", field=f"attributes.{name}")
    found = {name: _value(attributes[name], f"attributes.{name}") for name in sorted(attributes)}
    if "dataschema" in found:
        as_source(found["dataschema"], "attributes.dataschema")
    return found


def validate_size(payload: bytes, attributes: Mapping[str, str] = _NONE, *, limit: int = EVENT_BYTES_MAX) -> int:
    """The bytes of payload and optional attributes together, or InvalidInput if more than ``limit``."""
    size = len(payload) + sum(len(name) + len(value.encode()) for name, value in attributes.items())
    if size > limit:
        raise InvalidInput(
            f"the event has {size} bytes, at most {limit} are allowed",
            field="payload",
            hint="store the content elsewhere and send a reference",
        )
    return size


def wire_type(type: str, version: int) -> str:
    """The CloudEvents type: name + ``.v`` + version."""
    return f"{type}.v{version}"


def instant(time: datetime) -> str:
    """RFC 3339 in UTC with six fractional digits and ``Z``; the same instant always gives the same text."""
    if time.tzinfo is not UTC:
        if time.utcoffset() is None:
            raise InvalidInput("time has no zone", field="time")
        time = time.astimezone(UTC)
    until_second = _until_second(time.year, time.month, time.day, time.hour, time.minute, time.second)
    return f"{until_second}.{str(time.microsecond).zfill(6)}Z"


# A relay writes many times of the same second, and formatting them is a good part of its work.
@lru_cache(maxsize=256)
def _until_second(year: int, month: int, day: int, hour: int, minute: int, second: int) -> str:
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}"


def to_attributes(envelope: Envelope) -> dict[str, str]:
    """Every attribute by its CloudEvents name, in a fixed order; the content type is left to the binding."""
    found = {
        "specversion": SPECVERSION,
        "id": str(envelope.id),
        "source": envelope.source,
        "type": wire_type(envelope.type, envelope.version),
        "time": instant(envelope.time),
        "partitionkey": envelope.ordering_key,
        "sequence": f"{envelope.sequence:020}",
        "fptenant": envelope.tenant,
        "fpoperation": envelope.operation,
        "fpepoch": str(envelope.epoch),
        "fpdigest": envelope.digest.text,
    }
    if envelope.reference is not None:
        found["fpbinding"] = envelope.reference
    return found | {name: envelope.attributes[name] for name in sorted(envelope.attributes)}


def from_attributes(attributes: Mapping[str, str], content_type: str | None, payload: bytes | None) -> Envelope:
    """The envelope that ``attributes`` describe, or Undecodable naming the attribute; unknown ones are kept."""
    _check_content_type(content_type)
    if not payload:
        raise Undecodable("the event has no payload", reason="empty_payload", field="data")
    if attributes.get("specversion", SPECVERSION) != SPECVERSION:
        raise Undecodable("only CloudEvents 1.0 is read", reason="unsupported_specversion", field="specversion")
    for name in REQUIRED:
        if name not in attributes:
            raise _missing(name)
    try:
        return _envelope(attributes, payload)
    except InvalidInput as error:
        raise Undecodable(error.message, reason="invalid_attribute", field=error.field) from None


def _envelope(attributes: Mapping[str, str], payload: bytes) -> Envelope:
    extra: dict[str, str] = {}
    for name in sorted(attributes.keys() - _TAKEN) if len(attributes) > len(REQUIRED) else ():
        if _FOREIGN_NAME.match(name) is None:
            raise InvalidInput("an attribute name is not made of a-z and 0-9", field=content.shown_path((name,)))
        if name in OWN_ATTRIBUTES:
            raise InvalidInput(f"{name} may not be an attribute of a message in binary mode", field=name)
        extra[name] = _value(attributes[name], name, empty=True)
    if len(extra) > _FOREIGN_MAX:
        raise InvalidInput(f"more than {_FOREIGN_MAX} attributes", field="attributes")
    name, version = _name_and_version(attributes["type"])
    if (reference := attributes.get("fpbinding")) is not None and not reference.startswith("ref:"):
        raise InvalidInput("fpbinding carries references only", field="fpbinding")
    return Envelope(
        id=UUID(int=int(_matching(_UUID, attributes, "id").replace("-", ""), 16)),
        source=_source(attributes["source"]),
        type=name,
        version=version,
        tenant=_tenant(attributes["fptenant"]),
        operation=as_operation(attributes["fpoperation"], "fpoperation"),
        ordering_key=as_ordering_key(attributes["partitionkey"], "partitionkey"),
        epoch=_number(_EPOCH, attributes, "fpepoch"),
        digest=Digest.parse_text(attributes["fpdigest"], "fpdigest"),
        sequence=_number(_SEQUENCE, attributes, "sequence"),
        time=_time(attributes["time"]),
        payload=payload,
        attributes=extra,
        reference=None if reference is None else content.as_binding(reference, "fpbinding"),
    )


# The same few values come with every event of a stream; what is refused is not kept.
@lru_cache(maxsize=1024)
def _name_and_version(wire: str) -> tuple[str, int]:
    if (found := _WIRE_TYPE.match(wire)) is None:
        raise InvalidInput("type does not end in .v and a version", field="type")
    return as_type(found.group(1)), as_version(int(found.group(2)), "type")


@lru_cache(maxsize=1024)
def _source(text: str) -> str:
    return as_source(text)


@lru_cache(maxsize=1024)
def _tenant(text: str) -> str:
    return as_tenant(text, "fptenant")


def _missing(name: str) -> Undecodable:
    return Undecodable(f"the attribute {name} is missing", reason="missing_attribute", field=name)


def _check_content_type(content_type: str | None) -> None:
    if content_type is None:
        raise _missing("datacontenttype")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type.startswith("application/cloudevents"):
        raise Undecodable(
            "the event is in a batch, or in another format than JSON",
            reason="structured_mode_unsupported",
            field="datacontenttype",
            hint="send it in binary mode, or as application/cloudevents+json",
        )
    if media_type != CONTENT_TYPE:
        raise Undecodable(f"only {CONTENT_TYPE} is read", reason="unsupported_content_type", field="datacontenttype")


def _value(value: str, field: str, *, empty: bool = False) -> str:
    if type(value) is not str:
        raise InvalidInput(f"{field} must be a string, not {type(value).__name__}", field=field)
    if not value and not empty:
        raise InvalidInput(f"{field} is empty", field=field, hint="leave the attribute out")
    if (code := forbidden_character(value)) is not None:
        raise InvalidInput(f"{field} contains the forbidden character {code}", field=field)
    if len(value) > ATTRIBUTE_BYTES_MAX or len(value.encode()) > ATTRIBUTE_BYTES_MAX:
        raise InvalidInput(f"{field} is longer than {ATTRIBUTE_BYTES_MAX} bytes", field=field)
    return value


def _matching(pattern: re.Pattern[str], attributes: Mapping[str, str], name: str) -> str:
    if pattern.match(attributes[name]) is None:
        raise InvalidInput(f"{name} is not in its form", field=name)
    return attributes[name]


def _number(pattern: re.Pattern[str], attributes: Mapping[str, str], name: str) -> int:
    if (number := int(_matching(pattern, attributes, name))) > INT64_MAX:
        raise InvalidInput(f"{name} is beyond 2**63 - 1", field=name)
    return number


def _time(text: str) -> datetime:
    if _TIME.match(text) is None:
        raise InvalidInput("time is not RFC 3339", field="time")
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput("time is not a date of the calendar", field="time") from None
