"""A broker in memory between the real relay and the real inbox: what is committed leaves, and what arrives is handled.

    outbox.enqueue(conn, ReportAccepted(...))       # and commit
    broker.relay()                                  # the relay's own loop: slots, pages, confirms, acks
    broker.deliver(on_accepted)                     # the inbox's own code: decode, reserve, handle, commit

Only the broker's client and the network are missing. Topics exist once something is sent there; every consumer reads all
of a topic, and what it has not acknowledged arrives again.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, cast

from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries
from fencepost.operate.testing.crash import reach
from fencepost.operate.testing.databases import Database
from fencepost.operate.testing.messages import Kind, Message, encoded, shuffled
from fencepost.relay.destination import Destination
from fencepost.relay.pace import Pace
from fencepost.relay.parking import RetryPolicy
from fencepost.relay.publisher import CONFIRMED, WITHHELD, Answer, Outcome, Outgoing, ParkReason, Route
from fencepost.relay.sidecar import Relay, Summary
from fencepost.schemas.errors import ConfigError, FencepostError, InvalidInput, Unresolved

__all__ = ["MemoryBroker"]

DESTINATION = "memory"
CLUSTER = "memory"
TOPIC = "events"
TRIES_MAX = 1010
PACE = Pace(lease=8.0, refresh=0.3, confirm=2.5, poll_max=0.05, drain=1.0, retry=RetryPolicy(base=60, cap=3600))

B = TypeVar("B", Inbox[Any], AsyncInbox[Any])


class MemoryBroker:
    """Keeps what the relay published and feeds it to inboxes; ``kind`` decides how messages are encoded.

    Used by one thread, like a test.
    """

    def __init__(self, database: Database, kind: Kind = "kafka") -> None:
        self._database = database
        self._kind: Kind = kind
        self._messages: list[Message] = []
        self._acknowledged: dict[str, set[int]] = {}
        self._arrived: dict[str, set[int]] = {}
        self._faults: deque[Outcome] = deque()

    # -- from the outbox ---------------------------------------------------------------------------------------------

    def relay(self, routes: Sequence[Route] = (Route("*", TOPIC),)) -> Summary:
        """Publishes or parks all that is committed, through the real relay, and says how much it was.

        Other ``routes`` than at the last call take the place of those. Raises Unreachable when more events were to be
        nacked or left without a confirm than the relay has patience for.
        """
        destination = Destination(
            DESTINATION, self._kind, routes, lambda source: _Publisher(self, source), accept_routes=True
        )
        return Relay(self._database.dsn, [destination], pace=PACE).run_once()

    def nack(self, times: int = 1) -> None:
        """The next ``times`` events are nacked: not stored; the relay sends them again."""
        self._fail(times, Outcome(Answer.NACKED, detail="told to by a test"))

    def lose_confirms(self, times: int = 1) -> None:
        """The next ``times`` events are stored and their confirms lost; the relay sends them again: two copies."""
        self._fail(times, Outcome(Answer.UNKNOWN, detail="told to by a test"))

    def refuse(self, times: int = 1, reason: ParkReason = ParkReason.TOO_LARGE) -> None:
        """The next ``times`` events are refused for good; the relay parks them with this reason."""
        self._fail(times, Outcome(Answer.REFUSED, reason, "told to by a test"))

    # -- at the broker -----------------------------------------------------------------------------------------------

    def messages(self, topic: str | None = None) -> list[Message]:
        """What was published, copies included, in the order of arrival; to one topic or to all."""
        return [message for message in self._messages if topic is None or message.topic == topic]

    def age(self, by: float | timedelta) -> None:
        """Makes the events of all messages older, as `age` does with what is in the database."""
        older = by if isinstance(by, timedelta) else timedelta(seconds=by)
        self._messages = [message.older(older) for message in self._messages]

    def redeliver(self, inbox: Inbox[Any] | AsyncInbox[Any]) -> None:
        """Forgets what this consumer has acknowledged: the next `deliver` brings it all again."""
        self._acknowledged.pop(inbox.consumer, None)

    def waiting(self, inbox: Inbox[Any] | AsyncInbox[Any], topics: Sequence[str] | None = None) -> list[Message]:
        """What `deliver` would bring to this consumer now."""
        return [self._messages[n] for n in self._waiting(inbox, topics)]

    # -- to the inbox ------------------------------------------------------------------------------------------------

    def deliver(
        self,
        inbox: Inbox[Any] | AsyncInbox[Any],
        *,
        topics: Sequence[str] | None = None,
        copies: int = 1,
        shuffle: int | None = None,
        max_attempts: int | None = None,
        database: Any = None,
    ) -> list[Handled]:
        """Hands over what this consumer has not acknowledged, acknowledges what is handled, and says what became of it.

        Without ``topics`` every message of a type that the handler takes, else all of these topics. Each arrives
        ``copies`` times, acknowledged after the last. ``shuffle``, a seed, changes the order between keys, never within
        one. ``database`` is what the inbox opens its transactions on, in any form it takes (default: the fixture's).

        What the handler raises comes out; that message and later ones stay unacknowledged. With ``max_attempts`` it is
        judged as by a runner instead: tried again so often, then kept as a dead letter and acknowledged; Unresolved when
        that comes to no end.
        """
        if isinstance(inbox, AsyncInbox):
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(
                    self.deliver_async(
                        inbox,
                        topics=topics,
                        copies=copies,
                        shuffle=shuffle,
                        max_attempts=max_attempts,
                        database=database,
                    )
                )
            raise ConfigError("an event loop runs here", field="inbox", hint="await broker.deliver_async(...)")
        found: list[Handled] = []
        seen = _observed(inbox)
        opened = database or self._database.dsn
        options = None if max_attempts is None else _options(max_attempts)
        handling = None if options is None else Handling(seen, opened, options)
        try:
            for message, last in self._arrivals(inbox, topics, copies, shuffle):
                delivery = message.delivery(CLUSTER, redelivered=self._arrives(inbox.consumer, message))
                if handling is None or options is None:
                    found.append(seen.handle(opened, delivery))
                else:
                    tries = Tries(options)
                    while isinstance(done := handling.attempt(delivery, tries), Again):
                        _require_patience(tries)
                        time.sleep(done.seconds)
                    found.append(done)
                reach("after commit")
                self._settle(inbox.consumer, message, last)
        finally:
            if handling is not None:
                handling.close()
        return found

    async def deliver_async(
        self,
        inbox: AsyncInbox[Any],
        *,
        topics: Sequence[str] | None = None,
        copies: int = 1,
        shuffle: int | None = None,
        max_attempts: int | None = None,
        database: Any = None,
    ) -> list[Handled]:
        """As `deliver`, inside a running event loop."""
        found: list[Handled] = []
        seen = _observed(inbox)
        opened = database or self._database.dsn
        options = None if max_attempts is None else _options(max_attempts)
        handling = None if options is None else AsyncHandling(seen, opened, options)
        try:
            for message, last in self._arrivals(inbox, topics, copies, shuffle):
                delivery = message.delivery(CLUSTER, redelivered=self._arrives(inbox.consumer, message))
                if handling is None or options is None:
                    found.append(await seen.handle(opened, delivery))
                else:
                    tries = Tries(options)
                    while isinstance(done := await handling.attempt(delivery, tries), Again):
                        _require_patience(tries)
                        await asyncio.sleep(done.seconds)
                    found.append(done)
                reach("after commit")
                self._settle(inbox.consumer, message, last)
        finally:
            if handling is not None:
                await handling.close()
        return found

    def _waiting(self, inbox: Inbox[Any] | AsyncInbox[Any], topics: Sequence[str] | None) -> list[int]:
        done = self._acknowledged.get(inbox.consumer, set())
        types = {each.event_type for each in inbox.reading.classes}
        return [
            n
            for n, message in enumerate(self._messages)
            if n not in done and (message.topic in topics if topics is not None else not types or message.type in types)
        ]

    def _arrivals(
        self, inbox: Inbox[Any] | AsyncInbox[Any], topics: Sequence[str] | None, copies: int, shuffle: int | None
    ) -> list[tuple[Message, bool]]:
        if copies < 1:
            raise InvalidInput("copies is not at least 1", field="copies")
        waiting = [self._messages[n] for n in self._waiting(inbox, topics)]
        if shuffle is not None:
            waiting = shuffled(waiting, shuffle)
        return [(message, n == copies - 1) for message in waiting for n in range(copies)]

    def _arrives(self, consumer: str, message: Message) -> bool:
        """Notes an arrival; True when it is not the first of this message."""
        arrived = self._arrived.setdefault(consumer, set())
        before = message.offset in arrived
        arrived.add(message.offset)
        return before

    def _settle(self, consumer: str, message: Message, last: bool) -> None:
        if last:
            self._acknowledged.setdefault(consumer, set()).add(message.offset)

    def _fail(self, times: int, outcome: Outcome) -> None:
        if times < 1:
            raise InvalidInput("times is not at least 1", field="times")
        self._faults.extend([outcome] * times)

    def take(self, source: str, outgoing: Outgoing) -> Outcome:
        """One event reaches the broker: stored unless it is nacked or refused."""
        try:
            # Invariant: the offset is the place in the list; a copy is a message of its own.
            message = encoded(self._kind, source, len(self._messages), outgoing)
        except (FencepostError, ValueError, TypeError, AttributeError) as error:
            return Outcome(Answer.REFUSED, ParkReason.UNDECODABLE, type(error).__name__)
        outcome = self._faults.popleft() if self._faults else CONFIRMED
        if outcome.answer in (Answer.CONFIRMED, Answer.UNKNOWN):
            self._messages.append(message)
        return outcome


class _Publisher:
    """The relay's side of the broker: answers at once, and withholds what follows an event without a confirm."""

    def __init__(self, broker: MemoryBroker, source: str) -> None:
        self._broker = broker
        self._source = source

    def open(self, deadline: float) -> None:
        """Nothing to connect to."""

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        reach("before publish")
        outcomes: list[Outcome] = []
        stopped: set[tuple[str, str]] = set()
        for outgoing in batch:
            key = outgoing.row.tenant, outgoing.row.ordering_key
            outcome = WITHHELD if key in stopped else self._broker.take(self._source, outgoing)
            if outcome.answer is not Answer.CONFIRMED:
                stopped.add(key)
            outcomes.append(outcome)
        reach("after publish")
        answered: Future[list[Outcome]] = Future()
        answered.set_result(outcomes)
        return answered

    def close(self, deadline: float) -> None:
        """Nothing to leave."""


def _options(max_attempts: int) -> RunnerOptions:
    return RunnerOptions(concurrency=1, max_attempts=max_attempts, backoff_base=0.001, backoff_max=0.01)


def _require_patience(tries: Tries) -> None:
    if tries.tries >= TRIES_MAX:
        raise Unresolved(
            f"a delivery was tried {tries.tries} times, and the handler is not to blame",
            field="database",
            hint="see the log for what is",
        )


def _observed(inbox: B) -> B:
    """The same inbox, whose handler passes a crash point after it has returned."""
    seen = copy.copy(inbox)
    handler = cast(Any, inbox).handler

    if isinstance(inbox, AsyncInbox):

        @functools.wraps(handler)
        async def observed_async(tx: Any, event: Any) -> None:
            await handler(tx, event)
            reach("before commit")

        cast(Any, seen).handler = observed_async
    else:

        @functools.wraps(handler)
        def observed(tx: Any, event: Any) -> None:
            handler(tx, event)
            reach("before commit")

        cast(Any, seen).handler = observed
    return seen
