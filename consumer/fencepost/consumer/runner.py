"""What every runner does with one delivery: handle it, and decide on a failure between trying again and setting aside.

A failure of the handler counts; after ``max_attempts`` the delivery becomes a dead letter and its queue goes on.
What is not the handler's fault never counts: a database that cannot be reached or used, a copy handled elsewhere, a lost
serialization race. Those are tried again for as long as it takes, with capped backoff, and nothing is acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import tuple_row

from fencepost.consumer import dead_letters, retries
from fencepost.consumer.batch import BATCH_MAX
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Busy, Handled, Outcome, Unhandled
from fencepost.consumer.transactions import AsyncDatabase, Database, async_transactions_of, transactions_of
from fencepost.schemas.errors import ConfigError, ContractMismatch, InvalidInput, NotDispatched
from fencepost.schemas.transaction import driver_error

__all__ = ["Again", "AsyncHandling", "Handling", "RunnerOptions", "Tries", "require_fit"]

log = logging.getLogger("fencepost.consumer")

_SET_ASIDE = (Outcome.CONFLICT, Outcome.UNDECODABLE, Outcome.BEFORE_HORIZON, Outcome.OLD_EPOCH)
# 08 connection, 53 resources, 57P the server goes or is not up: nothing can be handled.
_AWAY = ("08", "53", "57P")
# 40 rollback for concurrency, 55P03 lock not available.
_NOT_THE_HANDLERS_FAULT = (*_AWAY, "40001", "40P01", "55P03")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Limits of a runner; times are in seconds.

    concurrency: handlers, and database connections but for one, at the same time. batch: how many messages, each of another key, may
    be handled in one transaction, one handler after the other; 1 gives each its own. max_attempts: failures of a handler before the
    delivery is set aside. backoff_base doubles with every try up to backoff_max, with jitter. drain_seconds: how long
    running handlers may take after a stop. start_seconds: how long broker and database may be missing at the start.
    answer_seconds: how long the database may take over one statement, a handler's own included, beyond the inbox's wait
    for another copy; for connections that are opened from a connection string.
    idle_seconds: how often dead letters that were given back are looked for.
    """

    concurrency: int = 4
    batch: int = 1
    max_attempts: int = 5
    backoff_base: float = 0.2
    backoff_max: float = 30.0
    drain_seconds: float = 25.0
    start_seconds: float = 30.0
    answer_seconds: float = 60.0
    idle_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 256:
            raise ConfigError("concurrency is not between 1 and 256", field="concurrency")
        if not 1 <= self.batch <= BATCH_MAX:
            raise ConfigError(f"batch is not between 1 and {BATCH_MAX}", field="batch")
        if not 1 <= self.max_attempts <= 1000:
            raise ConfigError("max_attempts is not between 1 and 1000", field="max_attempts")
        if not 0 < self.backoff_base <= self.backoff_max <= 3600:
            raise ConfigError(
                "backoff_base is not between 0 and backoff_max, or that above an hour", field="backoff_base"
            )
        if not 0.01 <= self.idle_seconds <= 3600:
            raise ConfigError("idle_seconds is not between 0.01 and 3600", field="idle_seconds")
        for name in ("drain_seconds", "start_seconds"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ConfigError(f"{name} is not between 0 and 3600", field=name)
        if not 0.1 <= self.answer_seconds <= 3600:
            raise ConfigError("answer_seconds is not between 0.1 and 3600", field="answer_seconds")

    def backoff(self, tries: int) -> float:
        """Seconds before the next try after ``tries`` failed ones."""
        return min(self.backoff_max, self.backoff_base * (1 << min(tries - 1, 20))) * random.uniform(0.75, 1.25)


@dataclass(frozen=True, slots=True)
class Again:
    """Nothing was committed: try the same delivery again after ``seconds``."""

    seconds: float


class Tries:
    """How often one delivery was tried in this process, and how often its handler was to blame."""

    def __init__(self, options: RunnerOptions) -> None:
        self._options = options
        self.tries = 0
        self.failures = 0

    def postponed(self) -> Again:
        """When to try again, where nothing was tried."""
        self.tries += 1
        return Again(self._options.backoff(self.tries))

    def failed(self, error: Exception, delivery: Delivery) -> Again | None:
        """When to try again, or None when the handler has failed as often as allowed. Logs ids and reason only."""
        self.tries += 1
        counted = not _transient(error)
        self.failures += counted
        reason = dead_letters.describe(error)
        if counted and self.failures >= self._options.max_attempts:
            log.error(
                "%s: handler failed %d times, set aside: %s at %s",
                delivery.coordinates,
                self.failures,
                reason,
                _place(error),
            )
            return None
        again = Again(self._options.backoff(self.tries))
        log.warning(
            "%s: not handled (%s, try %d), again in %.1f s: %s at %s",
            delivery.coordinates,
            f"failure {self.failures} of {self._options.max_attempts}" if counted else "not the handler's fault",
            self.tries,
            again.seconds,
            reason,
            _place(error),
        )
        return again


class Handling:
    """One sync inbox with the connections its handlers use; for threads."""

    def __init__(self, inbox: Inbox[Any], database: Database, options: RunnerOptions) -> None:
        self._inbox = inbox
        self._transactions = transactions_of(
            database,
            inbox.handler,
            options.concurrency + 1,
            answer_within=options.answer_seconds + inbox.wait_seconds,
        )
        # Invariant: a connection that was given serves one at a time.
        self._turn = nullcontext() if self._transactions.renews else threading.Lock()

    def attempt(self, delivery: Delivery, tries: Tries) -> Handled | Again:
        """Tries once. `Handled` is committed and may be acknowledged; after `Again` nothing may."""
        try:
            return _told(self._inbox.handle(self._transactions, delivery))
        except Exception as error:  # noqa: BLE001  # a handler may raise anything, and is judged
            return self._failed(error, delivery, tries)

    def attempt_many(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        """Tries each once, all of them in one transaction; for each what `attempt` says.

        A failure is judged as it is there, and takes nothing from the others. Give one of a key at a time, and alone what was
        tried before: whatever brings its transaction down keeps nobody else from being handled.
        """
        with self._turn:
            return self._attempt_many(works)

    def _attempt_many(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        if len(works) == 1:
            return [self.attempt(*works[0])]
        try:
            results = self._inbox.handle_many(self._transactions, [delivery for delivery, _ in works])
        except Exception as error:  # noqa: BLE001  # nothing of it was committed
            if _away(error):
                return _postponed(error, works)
            return [self.attempt(*work) for work in works]
        return [self._judged(result, *work) for result, work in zip(results, works, strict=True)]

    def _judged(self, result: Handled | Unhandled, delivery: Delivery, tries: Tries) -> Handled | Again:
        if isinstance(result, Handled):
            return _told(result)
        return Again(0.0) if result.error is None else self._failed(result.error, delivery, tries)

    def _failed(self, failure: Exception, delivery: Delivery, tries: Tries) -> Handled | Again:
        if (again := tries.failed(failure, delivery)) is not None:
            return again
        try:
            with self._transactions.begin() as begun:
                return dead_letters.handler_failed(begun.conn, self._inbox.consumer, delivery, failure, tries.failures)
        except Exception as error:  # noqa: BLE001  # every library wraps those of its driver
            return _unrecorded(error, delivery)

    def retry(self) -> bool:
        """Handles one dead letter that was given back; False when there is none. Raises nothing that a handler raises."""
        with self._turn:
            return self._retry()

    def _retry(self) -> bool:
        try:
            with self._transactions.begin() as begun:
                delivery = retries.take(begun.conn, self._inbox.consumer)
            if delivery is None:
                return False
            try:
                _told(self._inbox.handle(self._transactions, delivery))
            except Exception as error:  # noqa: BLE001  # a handler may raise anything, and is judged
                if _failed_again(error, delivery):
                    with self._transactions.begin() as begun:
                        dead_letters.handler_failed(begun.conn, self._inbox.consumer, delivery, error, 1)
        except Exception as error:  # noqa: BLE001  # every library wraps those of its driver
            log.warning("a dead letter was not taken: %s", dead_letters.describe(error))
            return False
        return True

    def fetch(self, statement: LiteralString, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """What a statement of the runner's own finds, in a transaction of its own, beside the handlers."""
        with self._turn, self._transactions.begin() as begun, begun.conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(statement, values).fetchall()

    def close(self) -> None:
        """Closes the connections that were opened here."""
        self._transactions.close()


class AsyncHandling:
    """As `Handling`, for asyncio."""

    def __init__(self, inbox: AsyncInbox[Any], database: AsyncDatabase, options: RunnerOptions) -> None:
        self._inbox = inbox
        self._transactions = async_transactions_of(
            database,
            inbox.handler,
            options.concurrency + 1,
            answer_within=options.answer_seconds + inbox.wait_seconds,
        )
        # Invariant: as in Handling.
        self._turn = nullcontext() if self._transactions.renews else asyncio.Lock()

    async def attempt(self, delivery: Delivery, tries: Tries) -> Handled | Again:
        """As `Handling.attempt`."""
        try:
            return _told(await self._inbox.handle(self._transactions, delivery))
        except Exception as error:  # noqa: BLE001  # a handler may raise anything, and is judged
            return await self._failed(error, delivery, tries)

    async def attempt_many(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        """As `Handling.attempt_many`."""
        async with self._turn:
            return await self._attempt_many(works)

    async def _attempt_many(self, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
        if len(works) == 1:
            return [await self.attempt(*works[0])]
        try:
            results = await self._inbox.handle_many(self._transactions, [delivery for delivery, _ in works])
        except Exception as error:  # noqa: BLE001  # as in Handling
            if _away(error):
                return _postponed(error, works)
            return [await self.attempt(*work) for work in works]
        return [await self._judged(result, *work) for result, work in zip(results, works, strict=True)]

    async def _judged(self, result: Handled | Unhandled, delivery: Delivery, tries: Tries) -> Handled | Again:
        if isinstance(result, Handled):
            return _told(result)
        return Again(0.0) if result.error is None else await self._failed(result.error, delivery, tries)

    async def _failed(self, failure: Exception, delivery: Delivery, tries: Tries) -> Handled | Again:
        if (again := tries.failed(failure, delivery)) is not None:
            return again
        try:
            async with self._transactions.begin() as begun:
                return await dead_letters.handler_failed_async(
                    begun.conn, self._inbox.consumer, delivery, failure, tries.failures
                )
        except Exception as error:  # noqa: BLE001  # as in Handling
            return _unrecorded(error, delivery)

    async def retry(self) -> bool:
        """As `Handling.retry`."""
        async with self._turn:
            return await self._retry()

    async def _retry(self) -> bool:
        try:
            async with self._transactions.begin() as begun:
                delivery = await retries.take_async(begun.conn, self._inbox.consumer)
            if delivery is None:
                return False
            try:
                _told(await self._inbox.handle(self._transactions, delivery))
            except Exception as error:  # noqa: BLE001  # a handler may raise anything, and is judged
                if _failed_again(error, delivery):
                    async with self._transactions.begin() as begun:
                        await dead_letters.handler_failed_async(begun.conn, self._inbox.consumer, delivery, error, 1)
        except Exception as error:  # noqa: BLE001  # every library wraps those of its driver
            log.warning("a dead letter was not taken: %s", dead_letters.describe(error))
            return False
        return True

    async def fetch(self, statement: LiteralString, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """As `Handling.fetch`."""
        async with self._turn, self._transactions.begin() as begun, begun.conn.cursor(row_factory=tuple_row) as cursor:
            return await (await cursor.execute(statement, values)).fetchall()

    async def close(self) -> None:
        """Closes the connections that were opened here."""
        await self._transactions.close()


def require_fit(inbox: Inbox[Any] | AsyncInbox[Any], database: Database | AsyncDatabase) -> None:
    """ConfigError (``database``) where this database lends what the handler does not take; opens nothing."""
    if isinstance(inbox, AsyncInbox):
        async_transactions_of(cast(AsyncDatabase, database), inbox.handler)
    else:
        transactions_of(cast(Database, database), inbox.handler)


def _postponed(error: Exception, works: Sequence[tuple[Delivery, Tries]]) -> list[Handled | Again]:
    """Nothing can be handled now: all of them again, after the same time."""
    again = max((tries.postponed() for _, tries in works), key=lambda each: each.seconds)
    log.warning(
        "%s and %d others: not handled (not the handler's fault), again in %.1f s: %s",
        works[0][0].coordinates,
        len(works) - 1,
        again.seconds,
        dead_letters.describe(error),
    )
    return [again] * len(works)


def _transient(error: Exception) -> bool:
    return _sqlstate_of(error, _NOT_THE_HANDLERS_FAULT)


def _away(error: Exception) -> bool:
    """Whether the database cannot be used at all, whatever was to be handled."""
    return not isinstance(error, Busy) and _sqlstate_of(error, _AWAY)


def _sqlstate_of(error: Exception, states: tuple[str, ...]) -> bool:
    """Whether it is of these, or of what has none: no connection, no answer, no database that could be used."""
    if isinstance(error, NotDispatched | ContractMismatch):
        return True
    if isinstance(error, ConfigError) and error.field == "database":
        return True
    driver = driver_error(error)
    if isinstance(driver, psycopg.OperationalError):
        return driver.sqlstate is None or driver.sqlstate.startswith(states)
    return False


def _failed_again(error: Exception, delivery: Delivery) -> bool:
    """Whether a retry's failure counts; else the letter is due again by itself, or somebody else has settled it."""
    counted = not _transient(error) and not (isinstance(error, InvalidInput) and error.field == "id")
    log.warning(
        "%s: dead letter %s was not handled (%s): %s at %s",
        delivery.coordinates,
        delivery.dead_letter,
        "kept" if counted else "not the handler's fault",
        dead_letters.describe(error),
        _place(error),
    )
    return counted


def _told(handled: Handled) -> Handled:
    level = logging.WARNING if handled.outcome in _SET_ASIDE else logging.DEBUG
    log.log(
        level,
        "%s: %s event=%s reason=%s field=%s arrivals=%d",
        handled.coordinates,
        handled.outcome,
        handled.event_id,
        handled.reason,
        handled.field,
        handled.arrivals,
    )
    return handled


def _unrecorded(error: Exception, delivery: Delivery) -> Again:
    log.error("%s: the dead letter could not be written: %s", delivery.coordinates, dead_letters.describe(error))
    return Again(1.0)


def _place(error: BaseException) -> str:
    """File and line where it was raised: enough to find it, and no text of anybody."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
