"""What a broker must offer to the relay: an answer for every event, and never a guess."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable
from uuid import UUID


class OutboxRow(NamedTuple):
    """One committed event as the page statement returns it; bytes are passed through unchanged, the time is the text that is sent."""

    slot: int
    seq: int
    event_id: UUID | str
    tenant: str
    operation: str
    type: str
    version: int
    epoch: int
    ordering_key: str
    digest: bytes
    recorded_at: str
    content_type: str
    attributes: str | None
    payload: bytes
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Where events whose type matches go: a Kafka topic, or an AMQP exchange with a routing key.

    `match` is an exact type, a prefix ending in `.*`, or `*`. `{type}` in `routing_key` stands for the type.
    """

    match: str
    to: str
    routing_key: str = "{type}"

    def matches(self, type_: str) -> bool:
        """True when events of this type take this route."""
        if self.match == "*":
            return True
        if self.match.endswith(".*"):
            return type_.startswith(self.match[:-1])
        return type_ == self.match


class Outgoing(NamedTuple):
    """One event on its way, with the route it takes."""

    row: OutboxRow
    route: Route


class ParkReason(StrEnum):
    """Why an event was set aside; a definite answer, but for `unanswered`: that one may have arrived, and is sent again."""

    UNROUTABLE = "unroutable"
    NO_ROUTE = "no_route"
    NO_SUCH_EXCHANGE = "no_such_exchange"
    NO_SUCH_TOPIC = "no_such_topic"
    TOO_LARGE = "too_large"
    NOT_AUTHORISED = "not_authorised"
    UNDECODABLE = "undecodable"
    UNKNOWN_VERSION = "unknown_version"
    NACKED = "nacked"
    UNANSWERED = "unanswered"
    BEHIND = "behind"
    OVERTAKEN = "overtaken"


class Answer(StrEnum):
    """What is known about one event after a send.

    confirmed: the broker's own confirm of that event arrived.
    refused: a definite no; the event is parked with its reason.
    nacked: a definite "not stored"; sent again, in the end as a parked one if others get through meanwhile.
    unknown: timed out, closed or cut; sent again likewise, with the same bytes, a duplicate is possible.
    withheld: not sent, because an earlier event of its key has no confirm.
    """

    CONFIRMED = "confirmed"
    REFUSED = "refused"
    NACKED = "nacked"
    UNKNOWN = "unknown"
    WITHHELD = "withheld"


class Outcome(NamedTuple):
    """The answer for one event; `reason` is set exactly when it was refused, `detail` never holds a payload."""

    answer: Answer
    reason: ParkReason | None = None
    detail: str = ""


CONFIRMED = Outcome(Answer.CONFIRMED)
WITHHELD = Outcome(Answer.WITHHELD)
UNKNOWN_VERSION = Outcome(Answer.REFUSED, ParkReason.UNKNOWN_VERSION, "digest or content type")
"""Of a row whose digest or content is of a kind that this version does not know: it would be sent under a wrong name."""


class Publisher(Protocol):
    """Publishes committed events to one broker.

    Order: events of one (tenant, ordering key) are handed over in the order of the sequence, within a send and
    across sends; when one of them is not confirmed, later ones of its key are withheld where the broker allows it.
    """

    def open(self, deadline: float) -> None:
        """Connect, or raise `Unreachable` (address without password) before `deadline` (monotonic seconds)."""
        ...

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        """One outcome per event, in the order of the batch, at the latest at `deadline` (monotonic seconds).

        Never raises for a broker's refusal and never blocks past the deadline; what has no answer by then is unknown.
        Several sends may be in flight; after an event without a confirm, later events of its key are withheld until the
        caller has asked for the result of that send.
        """
        ...

    def close(self, deadline: float) -> None:
        """Leave the broker; unanswered sends become unknown."""
        ...


class Place(NamedTuple):
    """What a broker said of one topic or exchange; `reason` is set when nothing may be sent there."""

    reason: ParkReason | None = None
    max_bytes: int | None = None


@runtime_checkable
class Inspectable(Protocol):
    """A publisher that can ask its broker about topics or exchanges without sending anything. Optional."""

    def inspect(self, names: Sequence[str], deadline: float) -> dict[str, Place]:
        """What the broker says of each of them, or `Unreachable` when it does not answer before `deadline` (monotonic).

        May be called from any thread once the publisher was opened; changes nothing at the broker.
        """
        ...


@runtime_checkable
class Declarer(Protocol):
    """A publisher that can make the topics or exchanges of its routes, for those who ask for it."""

    def declare(self, routes: Sequence[Route], deadline: float) -> None:
        """Makes what does not exist and leaves what does as it is; called after `open`.

        Raises `Unreachable` when the broker does not answer before `deadline` (monotonic seconds), `ConfigError` when it
        refuses.
        """
        ...
