"""How one effect is conducted: begun and committed, dispatched within its deadline, and every outcome recorded.

    what was seen                                             recorded                  the handler gets
    a returned Success                                        success                   it
    NotDispatched raised by the call itself                   failed_before_dispatch    NotDispatched
    deadline passed or lease lost before the dispatch         failed_before_dispatch    NotDispatched
    any other exception, deadline, cancellation, odd answer   unknown                   EffectUnknown
    the journal cannot be written                             -                         JournalUnusable (NotDispatched)
    the begin's commit lost: read back as not begun           -                         Unreachable (NotDispatched)
    the begin's commit lost: cannot be read back              stays pending             EffectUnknown
    the outcome cannot be written within its budget           stays pending             EffectUnknown

Not even a refused connection is definite by itself: it may be the second one of a client that tries again, or one to
somebody else. Unreachable is fencepost's own word about a database, not the call's about its provider.

Crash here: [E] between the committed begin and the committed outcome the effect stays pending; the lease's end or the
deadline makes it unknown, and nobody dispatches it again without evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar
from uuid import uuid4

import psycopg
from psycopg import Connection

from fencepost.jobs import effects
from fencepost.jobs.effects import Begun, Dispatch, Kind, NotSent, Outcome, Recorded, State, Success, Unclear
from fencepost.jobs.execution import Execution
from fencepost.jobs.journal_records import Begin
from fencepost.jobs.lanes import Lanes, certain
from fencepost.jobs.stage import dump
from fencepost.schemas.connect import ANSWER_SECONDS, address, connect
from fencepost.schemas.errors import (
    EffectUnknown,
    InvalidInput,
    NotDispatched,
    StaleEffectAttempt,
    Unreachable,
)
from fencepost.schemas.identity import EffectAttempt, as_effect_key

__all__ = ["Conduct", "Opened"]

A = TypeVar("A")
T = TypeVar("T")

log = logging.getLogger("fencepost.jobs")


@dataclass(frozen=True, slots=True)
class Opened:
    """An effect that is pending, committed, and may be dispatched until its deadline."""

    effect_key: str
    version: int
    dispatch: Dispatch


class Conduct:
    """Conducts the effects of one claim; nothing here waits, so threads and event loops use it alike."""

    def __init__(self, execution: Execution, work: Lanes, outcomes: Lanes) -> None:
        self._execution = execution
        self._fence = execution.job.fence
        self._work = work
        self._outcomes = outcomes

    def begin(
        self, effect_key: str, request: Mapping[str, object] | bytes, kind: Kind, timeout: float | None
    ) -> Future[Opened | Recorded]:
        """Records the intent; the deadline counts from now, before the round trip.

        Raises WrongTransaction while the attempt publishes: the callback's transaction holds the job's row.
        """
        started = time.monotonic()
        self._execution.forbid_inside("an effect")
        as_effect_key(effect_key)
        seconds = self._execution.policy.max_effect_timeout if timeout is None else timeout
        if not math.isfinite(seconds) or seconds <= 0:
            raise InvalidInput("timeout is not a positive number of seconds", field="timeout")
        digest = effects.request_digest(request)
        attempt = EffectAttempt(uuid4())

        def work(conn: Connection[Any]) -> Opened | Recorded:
            began = self._witnessed(
                lambda: self._begun(conn, effect_key, kind, attempt, digest, seconds), effect_key, kind, attempt, digest
            )
            if isinstance(began, Recorded):
                return began
            if began.lease is not None:
                self._execution.extend(started + began.lease)
            key = effects.idempotency_key(self._fence.tenant, self._fence.operation, effect_key)
            return Opened(effect_key, began.version, Dispatch(attempt, key, started + began.timeout, kind))

        return self._work.send(work)

    def _witnessed(
        self, begun: Callable[[], T], effect_key: str, kind: Kind, attempt: EffectAttempt, digest: bytes
    ) -> T:
        """Begins once the journal has the begin, where there is a journal; JournalUnusable when it cannot have it."""
        if (journal := self._execution.journal) is None:
            return begun()
        f = self._fence
        begin = Begin(
            tenant=f.tenant,
            operation=f.operation,
            job_class=f.job_class,
            effect_key=effect_key,
            effect_attempt=attempt,
            kind=kind,
            generation=f.generation,
            attempt=f.attempt,
            epoch=f.epoch,
            request_digest=digest.hex(),
        )
        return journal.witness(begin, begun)

    def _begun(
        self, conn: Connection[Any], effect_key: str, kind: Kind, attempt: EffectAttempt, digest: bytes, seconds: float
    ) -> Begun | Recorded:
        try:
            return effects.begin(
                conn, self._fence, effect_key, kind=kind, effect_attempt=attempt, digest=digest, timeout=seconds
            )
        except psycopg.OperationalError as lost:
            if not conn.closed:
                raise
            try:
                with connect(self._work.dsn, autocommit=True, answer_within=ANSWER_SECONDS) as again:
                    version = effects.begun(again, self._fence, effect_key, attempt)
            except (psycopg.Error, Unreachable):
                self._tell(effect_key, None, "begin_unreadable", None)
                raise self._unknown(effect_key, "its record can neither be confirmed nor denied") from lost
            if version is None:
                raise Unreachable(
                    "the connection was lost before the effect was recorded",
                    address=address(self._work.dsn),
                    field="database",
                    hint="safe to try again",
                ) from lost
            return Begun(timeout=seconds, lease=None, version=version)

    def refusal(self, began: Opened) -> Future[Success] | None:
        """None when the call may start now; else what to wait for: it raises NotDispatched."""
        if began.dispatch.seconds_left() == 0:
            late = "the deadline passed before the dispatch"
            return self.raised(began, NotDispatched(late, field="timeout"), "deadline_before_dispatch")
        if self._execution.is_lost:
            lost = "the lease was lost before the dispatch"
            return self.raised(began, NotDispatched(lost, field="lease"), "lease_lost_before_dispatch")
        return None

    def returned(self, began: Opened, value: object) -> Future[Success]:
        """What the call returned is recorded; only a Success is one."""
        if not isinstance(value, Success):
            return self._lost(began, "not_a_receipt", type(value).__name__)
        bad = _unkeepable(value)
        kept = None if bad is not None else value.result

        def then(recorded: Future[State]) -> Success:
            state = self._state(recorded)
            if state not in ("success", "resolved_applied"):
                self._tell(began.effect_key, None if state else began.version + 1, "not_recorded", value.receipt)
                raise self._unknown(began.effect_key, "its receipt could not be recorded as its outcome")
            if bad is not None:
                raise bad
            return value

        return chained(self._record(began, "success", receipt=value.receipt, result=kept), then)

    def raised(self, began: Opened, error: BaseException, why: str) -> Future[Success]:
        """What the call raised is recorded: as definite only where certainly nothing left this process."""
        if not definite(error):
            return self._lost(began, error.reason if isinstance(error, Unclear) else why, type(error).__name__)
        if why in ("raised", "timeout", "cancelled"):
            why = error.reason if isinstance(error, NotSent) else "not_dispatched"

        def then(recorded: Future[State]) -> Success:
            if self._state(recorded) != "failed_before_dispatch":
                self._tell(began.effect_key, began.version + 1, "not_recorded", None)
                raise self._unknown(began.effect_key, "its failure could not be recorded") from error
            raise error

        return chained(self._record(began, "failed_before_dispatch", reason=why), then)

    def follow(self, began: Opened, answer: Future[Any]) -> None:
        """An abandoned call may still answer: a receipt or a definite failure is late evidence, and is recorded."""

        def arrived(answer: Future[Any]) -> None:
            error = answer.exception()
            if definite(error):
                sent = self._record(began, "failed_before_dispatch", reason="late_failure")
            elif error is None and isinstance(value := answer.result(), Success):
                result = None if _unkeepable(value) else value.result
                sent = self._record(began, "success", receipt=value.receipt, result=result, reason="late_receipt")
            else:
                return
            sent.add_done_callback(
                lambda recorded: log.warning(
                    "late evidence for effect %s of tenant %s, operation %s: %s",
                    *(began.effect_key, self._fence.tenant, self._fence.operation),
                    self._state(recorded) or "could not be recorded",
                )
            )

        answer.add_done_callback(arrived)

    async def withdraw(self, opening: asyncio.Future[Opened | Recorded]) -> None:
        """The handler was cancelled while the begin was under way: whatever it recorded was never dispatched."""
        await asyncio.wait([opening])
        if opening.cancelled() or opening.exception() is not None:
            return
        if isinstance(began := opening.result(), Opened):
            sent = self._record(began, "failed_before_dispatch", reason="cancelled_before_dispatch")
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(sent)

    def _lost(self, began: Opened, why: str, what: str) -> Future[Success]:
        """The outcome is not known: recorded, told with the command that settles it, and raised."""

        def then(recorded: Future[State]) -> Success:
            state = self._state(recorded)
            self._tell(began.effect_key, began.version + 1, f"{why}: {what}", None)
            detail = "the call's outcome is not known" if state else "neither its outcome nor a record of that is known"
            raise self._unknown(began.effect_key, detail)

        return chained(self._record(began, "unknown", reason=why), then)

    def _record(
        self,
        began: Opened,
        outcome: Outcome,
        *,
        receipt: str | None = None,
        result: object = None,
        reason: str | None = None,
    ) -> Future[State]:
        attempt = began.dispatch.effect_attempt
        if (journal := self._execution.journal) is not None:
            journal.outcome(attempt, outcome, reason)
        return self._outcomes.send(
            lambda conn: effects.record(
                conn,
                self._fence,
                began.effect_key,
                attempt,
                outcome,
                receipt=receipt,
                result=result,
                reason=reason,
            )
        )

    def _state(self, recorded: Future[State]) -> State | None:
        """The state that was recorded; None when it was settled otherwise already, or could not be written."""
        error = recorded.exception()
        if error is None:
            return recorded.result()
        if not isinstance(error, StaleEffectAttempt):
            log.error("an outcome could not be recorded: %s", type(error).__name__)
        return None

    def _unknown(self, effect_key: str, detail: str) -> EffectUnknown:
        return EffectUnknown(
            f"effect {effect_key} is unknown: {detail}",
            field="effect_key",
            hint="look for the receipt at the provider, then reconcile; the command is in the log",
        )

    def _tell(self, effect_key: str, version: int | None, why: str, receipt: str | None) -> None:
        log.warning(
            "effect unknown (%s): %s", why, effects.reconcile_command(self._fence, effect_key, version, receipt)
        )


def definite(error: BaseException | None) -> TypeGuard[NotDispatched]:
    """Whether the call itself said that nothing left this process."""
    return isinstance(error, NotDispatched) and not isinstance(error, Unreachable)


def _unkeepable(value: Success) -> InvalidInput | None:
    """Why its result cannot be stored, if so; the receipt counts all the same."""
    try:
        dump(value.result, "result")
    except InvalidInput as error:
        return error
    return None


def chained(source: Future[A], then: Callable[[Future[A]], T]) -> Future[T]:
    """A future of what ``then`` makes of the finished source."""
    made: Future[T] = certain()

    def done(finished: Future[A]) -> None:
        try:
            value = then(finished)
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
            made.set_exception(error)
        else:
            made.set_result(value)

    source.add_done_callback(done)
    return made
