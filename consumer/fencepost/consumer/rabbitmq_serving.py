"""Deliveries in hand: of one key one after the other in their order, of all at most ``concurrency`` times ``batch``.

They outlive the session that brought them; their acknowledgement does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError

from fencepost.consumer.armed import POINT, READ_SECONDS, Point, not_armed, reason
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.executors import Daemons
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries
from fencepost.consumer.standing import Standing
from fencepost.consumer.transactions import AsyncDatabase, Database

__all__ = ["LOSSES", "Serving"]

log = logging.getLogger("fencepost.consumer.rabbitmq")

LOSSES = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, RuntimeError)


class _Session(Protocol):
    """One connection; ``closed`` makes every acknowledgement of it stale."""

    closed: bool


class _Turn:
    """Who of one key is next; kept while somebody waits or works."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """The next delivery of its key; ``told`` gets None where it is not tried any more."""

    session: _Session
    delivery: Delivery
    tries: Tries
    told: asyncio.Future[Handled | Again | None]


class Serving:
    """Works on deliveries until it ends; lives in one event loop."""

    def __init__(
        self,
        inbox: Inbox[Any] | AsyncInbox[Any],
        database: Database | AsyncDatabase,
        options: RunnerOptions,
        stop: asyncio.Event,
        standing: Standing,
    ) -> None:
        self._options = options
        self._stop = stop
        self._standing = standing
        self._slots = asyncio.Semaphore(options.concurrency)
        # In the order of their arrival, with its time.
        self._tasks: dict[asyncio.Task[None], float] = {}
        self._turns: dict[bytes, _Turn] = {}
        self._waiting: deque[_Waiting] = deque()
        self._hands: set[asyncio.Task[None]] = set()
        self._running = 0
        self._giving_back: asyncio.Task[None] | None = None
        self._retrying = False
        self._armed = True
        self._pool: Daemons | None = None
        self._sync: Handling | None = None
        self._async: AsyncHandling | None = None
        if isinstance(inbox, AsyncInbox):
            self._async = AsyncHandling(inbox, cast(AsyncDatabase, database), options)
        else:
            self._sync = Handling(inbox, cast(Database, database), options)
            # One more than handlers run: what is asked beside them waits for none.
            self._pool = Daemons(options.concurrency + 1)

    async def armed(self) -> bool:
        """Whether handlers may run. A database that does not say it leaves it as it was."""
        with suppress(Exception):
            rows = await asyncio.wait_for(self._asked(), READ_SECONDS)
            armed = Point(*rows[0]).armed
            if armed and not self._armed:
                log.info("the database may be used again")
            elif not armed and self._armed:
                log.warning("nothing is handled for now: %s", reason(not_armed()))
            self._armed = armed
        return self._armed

    async def _asked(self) -> list[tuple[Any, ...]]:
        nothing: dict[str, object] = {}
        if self._async is not None:
            return await self._async.fetch(POINT, nothing)
        assert self._sync is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._sync.fetch, POINT, nothing)

    def in_flight(self) -> int:
        """Deliveries in the hands of a handler; for any thread."""
        return self._running

    def oldest(self) -> float | None:
        """Seconds since the arrival of the oldest delivery in hand; for any thread."""
        since = next(iter(self._tasks.copy().values()), None)
        return None if since is None else time.monotonic() - since

    def take(self, session: _Session, message: AbstractIncomingMessage, delivery: Delivery) -> None:
        """Works on a delivery in a task of its own; prefetch bounds their number."""
        task = asyncio.create_task(self._work(session, message, delivery))
        self._tasks[task] = time.monotonic()
        task.add_done_callback(self._tasks.pop)

    def give_back(self) -> None:
        """Handles dead letters that an operator gave back, one at a time where no message waits, until it ends."""
        self._giving_back = self._giving_back or asyncio.create_task(self._given_back())

    async def drain(self) -> None:
        """Waits for running handlers, at most ``drain_seconds``; what waits for its turn gives up by itself."""
        running = set(self._tasks)
        if self._giving_back is not None and self._retrying:
            running.add(self._giving_back)
        if not running:
            return
        _, pending = await asyncio.wait(running, timeout=self._options.drain_seconds)
        if pending:
            log.warning("%d handlers were still running after %.0f s", len(pending), self._options.drain_seconds)

    async def end(self) -> None:
        """Drains, then cancels what is left; a cancelled handler's transaction is rolled back."""
        await self.drain()
        left = [*self._tasks, *self._hands, *([] if self._giving_back is None else [self._giving_back])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown()
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            await self._async.close()

    async def _given_back(self) -> None:
        while not self._stop.is_set():
            found = False
            if self._armed and not self._slots.locked():
                async with self._slots:
                    self._retrying = True
                    try:
                        found = await self._retry()
                    finally:
                        self._retrying = False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.001 if found else self._options.idle_seconds)

    async def _retry(self) -> bool:
        if self._async is not None:
            return await self._async.retry()
        assert self._sync is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._sync.retry)

    async def _work(self, session: _Session, message: AbstractIncomingMessage, delivery: Delivery) -> None:
        async with self._turn(delivery.order):
            tries = Tries(self._options)
            while True:
                result = await self._tried(session, delivery, tries)
                if result is None:
                    return  # Not acknowledged: the broker gives it to somebody else.
                if isinstance(result, Handled):
                    break
                self._standing.failed()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), result.seconds)
            self._standing.told(result)
        if session.closed:
            log.warning("%s: acknowledgement dropped, its channel is closed", delivery.coordinates)
            return
        try:
            await message.ack()
        except LOSSES as error:
            log.warning("%s: acknowledgement lost: %s", delivery.coordinates, type(error).__name__)

    @asynccontextmanager
    async def _turn(self, key: bytes) -> AsyncGenerator[None]:
        """Waits until nobody who came before has this key; a copy that a new session brought waits as well."""
        turn = self._turns.setdefault(key, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]

    async def _tried(self, session: _Session, delivery: Delivery, tries: Tries) -> Handled | Again | None:
        """One try, together with others that wait as well; None once stopped, or when its session is over."""
        waiting = _Waiting(session, delivery, tries, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        hand = asyncio.create_task(self._hand())
        self._hands.add(hand)
        hand.add_done_callback(self._hands.discard)
        return await waiting.told

    async def _hand(self) -> None:
        """Tries what waits when a slot is free, up to a batch; another hand may have taken it already."""
        async with self._slots:
            if not (works := self._taken()):
                return
            try:
                results = await self._attempt([(each.delivery, each.tries) for each in works])
            except BaseException:
                for waiting in works:
                    waiting.told.cancel()
                raise
            for waiting, result in zip(works, results, strict=True):
                if not waiting.told.done():
                    waiting.told.set_result(result)

    def _taken(self) -> list[_Waiting]:
        """The next ones; what was tried before is taken alone."""
        works: list[_Waiting] = []
        while self._waiting and len(works) < self._options.batch:
            waiting = self._waiting[0]
            if works and waiting.tries.tries:
                break
            self._waiting.popleft()
            if waiting.told.done():
                continue
            if self._stop.is_set() or waiting.session.closed:
                waiting.told.set_result(None)
                continue
            works.append(waiting)
            if waiting.tries.tries:
                break
        return works

    async def _attempt(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        self._running += len(works)
        try:
            if self._async is not None:
                return await self._async.attempt_many(works)
            assert self._sync is not None
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._sync.attempt_many, works)
        finally:
            self._running -= len(works)
