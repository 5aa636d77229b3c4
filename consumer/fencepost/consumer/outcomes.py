"""What became of a delivery: a closed list, each with its own consequence for the acknowledgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self
from uuid import UUID

from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import NotDispatched

__all__ = ["Busy", "Handled", "Outcome", "Reservation", "Reserved", "Unhandled"]


class Outcome(StrEnum):
    """Every member is committed, so every member may be acknowledged.

    handled: the handler ran and its changes were committed with the reservation.
    duplicate: the operation was handled before with this meaning; nothing ran.
    conflict: the operation, or the delivery, was seen before with another meaning; kept as a dead letter, nothing ran.
    before_horizon: nothing is known of it, and it is older than what this consumer remembers; kept as a dead letter,
    nothing ran.
    old_epoch: nothing is known of it, and this installation accepted it under an authority epoch that is over; kept as a
    dead letter until an authority admin releases it, nothing ran.
    undecodable: it cannot be read, or its type or version is not known here yet; kept as a dead letter, nothing ran.
    handler_failed: the handler failed as often as allowed; kept as a dead letter, nothing of it was committed.
    """

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    BEFORE_HORIZON = "before_horizon"
    OLD_EPOCH = "old_epoch"
    UNDECODABLE = "undecodable"
    HANDLER_FAILED = "handler_failed"


class Reserved(StrEnum):
    """The answer of the database to a reservation; only ``reserved`` may be handled."""

    RESERVED = "reserved"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    BEFORE_HORIZON = "before_horizon"
    OLD_EPOCH = "old_epoch"


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to one reservation, true once the caller's transaction commits.

    ``arrivals`` counts the committed arrivals of this delivery, with this one. ``other_epoch``: a duplicate that was
    accepted under another authority epoch. ``transaction`` is the id of the reserving transaction, ``mark`` the name that
    the application has in it, where it was marked.
    """

    outcome: Reserved
    arrivals: int
    other_epoch: bool
    transaction: str
    mark: bytes | None = None


@dataclass(frozen=True, slots=True)
class Handled:
    """What became of one delivery, committed. Ids and typed reasons only; ids are None where it was undecodable."""

    outcome: Outcome
    coordinates: str
    arrivals: int = 0
    other_epoch: bool = False
    tenant: str | None = None
    operation: str | None = None
    type: str | None = None
    version: int | None = None
    event_id: UUID | None = None
    reason: str | None = None
    """Of an undecodable delivery: a `fencepost.schemas.errors.Reason`; of a failed one: the name of the error."""
    field: str | None = None

    @classmethod
    def of(cls, envelope: Envelope, outcome: Outcome, coordinates: str, arrivals: int, other_epoch: bool) -> Self:
        """That of a delivery that could be read."""
        return cls(
            outcome,
            coordinates,
            arrivals,
            other_epoch,
            envelope.tenant,
            envelope.operation,
            envelope.type,
            envelope.version,
            envelope.id,
        )


@dataclass(frozen=True, slots=True)
class Unhandled:
    """One delivery of a batch of which nothing was committed: it must not be acknowledged, and has to come again.

    ``error`` is what its handler raised; None where an earlier event of its ordering key was not handled.
    """

    coordinates: str
    error: Exception | None = field(default=None, repr=False)


class Busy(NotDispatched):
    """Another copy of this operation is being handled and did not end within the wait: deliver again later."""
