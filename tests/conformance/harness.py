"""What the suite needs from a broker. For a third publisher: write one `Broker`, add it to `BROKERS`, run the suite."""

import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from fencepost.relay.publisher import Answer, OutboxRow, Outcome, Outgoing, ParkReason, Publisher, Route
from fencepost.schemas import content, digest
from fencepost.schemas.envelope import Envelope, instant

SOURCE = "urn:fencepost:conformance"
TENANT = "acme"
SEND_SECONDS = 20.0
READ_SECONDS = 20.0
# How much later than its deadline an answer may be seen, on a machine that does other things as well.
LATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Features:
    """How brokers differ where the suite has to know.

    `missing`: the reason for a destination that does not exist. `unroutable`: the reason for a destination that exists
    but leads nowhere, or None where there is no such thing. `pausable`: the suite may stop the broker's process.
    `limit`: body bytes beyond which the publisher of `Broker.publisher` refuses. `shortest`: the nearest deadline in
    seconds that `send` accepts of an impatient one.
    """

    name: str
    missing: ParkReason
    unroutable: ParkReason | None
    pausable: bool
    limit: int
    shortest: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """One message as read from the broker: every byte that a consumer can see, and what it decodes to."""

    wire: tuple[object, ...]
    envelope: Envelope


class Broker(Protocol):
    """One broker under test; the oracle is what `read` finds in it."""

    @property
    def features(self) -> Features: ...

    def publisher(self, *, impatient: bool = False) -> Publisher:
        """A new publisher, not opened, with limits as in `features`; an impatient one is for a broker that is stopped."""
        ...

    def astray(self) -> Publisher:
        """A publisher for an address where nobody answers; with a password `SECRET` in it where there is one."""
        ...

    def destination(self) -> Route:
        """A new destination that exists."""
        ...

    def missing(self) -> Route:
        """One that does not exist."""
        ...

    def nowhere(self) -> Route:
        """One that exists and leads nowhere; only called with `features.unroutable`."""
        ...

    def read(self, route: Route, expected: int, within: float = READ_SECONDS) -> list[Arrived]:
        """Everything in the destination, in order: returns with `expected` messages and whatever else is there."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def event(route: Route, seq: int, key: str = "k", *, size: int = 200, tenant: str = TENANT) -> Outgoing:
    """An event with a valid digest; equal arguments give different events."""
    payload = json.dumps({"n": seq, "pad": "x" * size}).encode()
    operation = f"{key}-{seq}"
    row = OutboxRow(
        slot=0,
        seq=seq,
        event_id=uuid.uuid4(),
        tenant=tenant,
        operation=operation,
        type="report.accepted",
        version=1,
        epoch=7,
        ordering_key=key,
        digest=digest.digest(tenant, operation, "report.accepted", 1, 7, content.binding(payload)).raw,
        recorded_at=instant(datetime.now(UTC)),
        content_type="application/json",
        attributes='{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
        payload=payload,
    )
    return Outgoing(row, route)


def send(publisher: Publisher, batch: Sequence[Outgoing], seconds: float = SEND_SECONDS) -> list[Outcome]:
    """Sends and waits; the answer must be there soon after the deadline."""
    return publisher.send(batch, time.monotonic() + seconds).result(timeout=seconds + LATE_SECONDS)


def send_until_confirmed(publisher: Publisher, batch: Sequence[Outgoing], within: float = 60.0) -> None:
    """As the relay does: whatever is not confirmed is sent again, with the same bytes, until `within` is over."""
    left = list(batch)
    until = time.monotonic() + within
    outcomes: list[Outcome] = []
    while left:
        assert time.monotonic() < until, f"not confirmed: {set(outcomes)}"
        outcomes = send(publisher, left)
        left = [sent for sent, outcome in zip(left, outcomes, strict=True) if outcome.answer is not Answer.CONFIRMED]


def answers(outcomes: Sequence[Outcome]) -> list[Answer]:
    return [outcome.answer for outcome in outcomes]


def ids(arrived: Sequence[Arrived]) -> list[uuid.UUID]:
    return [one.envelope.id for one in arrived]


def fingerprint(one: Arrived) -> str:
    """All bytes of one copy, as one hash."""
    return hashlib.sha256(repr(one.wire).encode()).hexdigest()
