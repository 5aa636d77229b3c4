"""Names and numbers that identify things, and the one place that says which of them are acceptable.

Identities are compared as they are: case-sensitive, never trimmed, never normalised. What could not travel
through every layer (PostgreSQL text, Kafka and AMQP headers, CloudEvents strings) is refused where it enters.
"""

from __future__ import annotations

import re
import sys
from typing import NewType
from uuid import UUID

from fencepost.schemas.errors import InvalidInput

if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    import os
    import time

    def uuid7() -> UUID:
        """A UUID of version 7 (RFC 9562): milliseconds of the clock, then 74 random bits; never order by it."""
        value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
        value = value & ~(0xF << 76) | 0x7 << 76
        return UUID(int=value & ~(0x3 << 62) | 0x2 << 62)


__all__ = [
    "IDENTITY_CHARS_MAX",
    "INT64_MAX",
    "NAME_CHARS_MAX",
    "VERSION_MAX",
    "Attempt",
    "ConsumerName",
    "EffectAttempt",
    "EffectKey",
    "Epoch",
    "EventId",
    "EventType",
    "Generation",
    "JobClass",
    "OperationId",
    "OrderingKey",
    "Owner",
    "Sequence",
    "Source",
    "Tenant",
    "Version",
    "as_class",
    "as_consumer",
    "as_effect_key",
    "as_name",
    "as_operation",
    "as_ordering_key",
    "as_source",
    "as_tenant",
    "as_text",
    "as_type",
    "as_version",
    "forbidden_character",
    "uuid7",
]

IDENTITY_CHARS_MAX = 200
NAME_CHARS_MAX = 120
VERSION_MAX = 32_767
INT64_MAX = 2**63 - 1

Tenant = NewType("Tenant", str)
OperationId = NewType("OperationId", str)
OrderingKey = NewType("OrderingKey", str)
EffectKey = NewType("EffectKey", str)
EventId = NewType("EventId", UUID)
EventType = NewType("EventType", str)
Version = NewType("Version", int)
ConsumerName = NewType("ConsumerName", str)
JobClass = NewType("JobClass", str)
Source = NewType("Source", str)
Owner = NewType("Owner", str)
Attempt = NewType("Attempt", UUID)
EffectAttempt = NewType("EffectAttempt", UUID)
Generation = NewType("Generation", int)
Epoch = NewType("Epoch", int)
Sequence = NewType("Sequence", int)

# What a CloudEvents string may not hold: C0, DEL, C1, lone surrogates, noncharacters of every plane.
_FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17))
    + "]"
)
# What most identities are made of, and nothing of which is refused below.
_PLAIN = re.compile(r"[!-~]+\Z")
_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*\Z")
_CONSUMER = re.compile(r"[a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_-]*)*\Z")
_VERSIONED = re.compile(r".*\.v[0-9]+\Z")
_URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+\Z")


def forbidden_character(value: str) -> str | None:
    """The code point (``U+0000``) of the first character that may not travel in an attribute, or None."""
    found = _FORBIDDEN.search(value)
    return None if found is None else f"U+{ord(found.group()):04X}"


def as_text(value: str, field: str, *, chars_max: int = IDENTITY_CHARS_MAX) -> str:
    """``value`` unchanged, or InvalidInput naming ``field``; 1 to ``chars_max`` code points."""
    if type(value) is str and len(value) <= chars_max and _PLAIN.match(value) is not None:
        return value
    if type(value) is not str:
        raise InvalidInput(f"{field} must be a string, not {type(value).__name__}", field=field)
    if not value:
        raise InvalidInput(f"{field} must not be empty", field=field)
    if len(value) > chars_max:
        raise InvalidInput(f"{field} has {len(value)} characters, at most {chars_max} are allowed", field=field)
    if (code := forbidden_character(value)) is not None:
        raise InvalidInput(f"{field} contains the forbidden character {code}", field=field)
    if value[0].isspace() or value[-1].isspace():
        raise InvalidInput(
            f"{field} begins or ends with white space",
            field=field,
            hint="identities are compared as they are: strip it where it enters",
        )
    return value


def as_tenant(value: str, field: str = "tenant") -> Tenant:
    """A tenant, or InvalidInput."""
    return Tenant(as_text(value, field))


def as_operation(value: str, field: str = "operation") -> OperationId:
    """A business identity of one request, or InvalidInput."""
    return OperationId(as_text(value, field))


def as_ordering_key(value: str, field: str = "ordering_key") -> OrderingKey:
    """A key whose events keep their order, or InvalidInput."""
    return OrderingKey(as_text(value, field))


def as_effect_key(value: str, field: str = "effect_key") -> EffectKey:
    """A key of an effect within its operation, or InvalidInput."""
    return EffectKey(as_text(value, field))


def as_name(value: str, field: str) -> str:
    """A dotted lower-case name such as ``report.accepted``, at most 120 characters, or InvalidInput."""
    as_text(value, field, chars_max=NAME_CHARS_MAX)
    if _NAME.match(value) is None:
        raise InvalidInput(f"{field} must be dotted lower-case words", field=field, hint="for example report.accepted")
    return value


def as_type(value: str, field: str = "type") -> EventType:
    """The name of an event type, without its version, or InvalidInput."""
    as_name(value, field)
    if _VERSIONED.match(value) is not None:
        raise InvalidInput(f"{field} ends in a version", field=field, hint="give the version as a number of its own")
    return EventType(value)


def as_class(value: str, field: str = "class") -> JobClass:
    """The name of a job class, or InvalidInput."""
    return JobClass(as_name(value, field))


def as_consumer(value: str, field: str = "consumer") -> ConsumerName:
    """The name of a consumer (a dotted name that may also contain hyphens), or InvalidInput."""
    as_text(value, field, chars_max=NAME_CHARS_MAX)
    if _CONSUMER.match(value) is None:
        raise InvalidInput(f"{field} must be lower-case words", field=field, hint="for example report-analysis")
    return ConsumerName(value)


def as_version(value: int, field: str = "version") -> Version:
    """A version of an event type, 1 to 32767, or InvalidInput."""
    if type(value) is not int or not 1 <= value <= VERSION_MAX:
        raise InvalidInput(f"{field} must be a whole number from 1 to {VERSION_MAX}", field=field)
    return Version(value)


def as_source(value: str, field: str = "source") -> Source:
    """The URI reference of a producer, or InvalidInput."""
    as_text(value, field)
    if _URI_REFERENCE.match(value) is None:
        raise InvalidInput(f"{field} must be a URI reference", field=field, hint="for example urn:fencepost:reports")
    return Source(value)
