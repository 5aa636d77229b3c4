"""What a journal remembers: identities, digests and codes, one JSON object for each record; never a request or a receipt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, ClassVar, cast
from uuid import UUID

__all__ = [
    "Acknowledged",
    "Begin",
    "Closed",
    "NotBegun",
    "Opened",
    "Other",
    "Outcome",
    "Presented",
    "Record",
    "Repaired",
    "Rotated",
    "decode",
    "encode",
    "now",
]


def now() -> str:
    """The time by this machine's clock; it informs people and decides nothing."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One fact; ``at`` is the machine's clock."""

    name: ClassVar[str]
    at: str = field(default_factory=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Record):
    """A writer has opened the journal."""

    name: ClassVar[str] = "opened"
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Record):
    """An effect is about to be begun; durable before the database hears of it."""

    name: ClassVar[str] = "begin"
    tenant: str
    operation: str
    job_class: str
    effect_key: str
    effect_attempt: UUID
    kind: str
    generation: int
    attempt: UUID
    epoch: int
    request_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBegun(Record):
    """The database has certainly not recorded this begin: refused, or rolled back."""

    name: ClassVar[str] = "not_begun"
    effect_attempt: UUID
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Record):
    """What this process saw of an effect whose begin was committed; said before the database is told."""

    name: ClassVar[str] = "outcome"
    effect_attempt: UUID
    outcome: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented(Record):
    """The database was shown this begin, and what it made of it."""

    name: ClassVar[str] = "presented"
    effect_attempt: UUID
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged(Record):
    """Somebody has looked at a begin that the database does not know; it is not presented again."""

    name: ClassVar[str] = "acknowledged"
    effect_attempt: UUID
    actor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired(Record):
    """A torn tail was moved to the file ``quarantine``; ``digest`` is the sha256 of what was moved."""

    name: ClassVar[str] = "repaired"
    actor: str
    offset: int
    length: int
    quarantine: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated(Record):
    """The last record of a segment that has a successor."""

    name: ClassVar[str] = "rotated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Record):
    """The last record of a segment whose writer ended well."""

    name: ClassVar[str] = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Other(Record):
    """A record of a kind that this version does not know."""

    name: ClassVar[str] = "other"
    record: str


KINDS: dict[str, type[Record]] = {
    kind.name: kind for kind in (Opened, Begin, NotBegun, Outcome, Presented, Acknowledged, Repaired, Rotated, Closed)
}
UUIDS = {"effect_attempt", "attempt"}


def encode(record: Record) -> bytes:
    """The record as JSON."""
    given = ((member.name, getattr(record, member.name)) for member in fields(record))
    values = {name: str(value) if isinstance(value, UUID) else value for name, value in given}
    return json.dumps({"record": record.name} | values, separators=(",", ":"), ensure_ascii=False).encode()


def decode(payload: bytes) -> Record:
    """The record; ValueError when it is none. Members that this version does not know are passed over."""
    found: Any = json.loads(payload)
    match found:
        case {"record": str(name), "at": str(at)}:
            values = cast(dict[str, Any], found)
        case _:
            raise ValueError("no record")
    kind = KINDS.get(name)
    if kind is None:
        return Other(record=name, at=at)
    given = {member.name: values[member.name] for member in fields(kind) if member.name in values}
    try:
        for member in UUIDS & given.keys():
            given[member] = UUID(given[member])
        return kind(**given)
    except (TypeError, AttributeError) as error:
        raise ValueError("a member is missing, or is no UUID") from error
