"""Upkeep beside a worker: escalates unknown effects, asks providers for receipts, and archives finished jobs.

The proof is PostgreSQL's (`sql/functions/effects`); here is only who asks, and when. A provider is asked outside of any
transaction, by threads of their own that nobody has to wait for.

Crash here: [L] between a question that was taken and its answer: its lease ends, and somebody asks again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import Connection

from fencepost.jobs import escalation, lookup
from fencepost.jobs.archive import Archiving
from fencepost.jobs.context import abandonable
from fencepost.jobs.lookup import Answer, Asked, DidNotHappen, Inconclusive, Landed, ReceiptLookup, Taken
from fencepost.schemas.connect import ANSWER_SECONDS
from fencepost.schemas.contract import connect
from fencepost.schemas.errors import (
    EvidenceMissing,
    InvalidInput,
    NotQuiescent,
    NotUnknown,
    StaleEffectAttempt,
    WrongVersion,
)

__all__ = ["Upkeep"]

TURN_SECONDS = 2.0
ESCALATE_SECONDS = 30.0
PAUSE_SECONDS_MAX = 60.0
# At most this many questions are under way in a process, those included that never end.
ASKED_MAX = 8
ASK_SECONDS = 15.0
LEASE_MARGIN_SECONDS = 30.0
BACKOFF_SECONDS = 5.0
BACKOFF_SECONDS_MAX = 900.0
# After the moment from which a negative answer counts; clocks need not agree.
QUIESCENT_MARGIN_SECONDS = 0.05
DELAY_SECONDS_MAX = 86_400.0

log = logging.getLogger("fencepost.jobs.upkeep")


class Upkeep:
    """Runs beside a worker in a daemon thread of its own, and never brings the process down.

    Any number of workers may do it: an effect is asked about by one at a time. Escalation and archive need a login with the
    role maintenance, look-ups one with the role reconciler; what the login may not do is told once, and left to others.
    """

    def __init__(
        self,
        dsn: str,
        owner: str,
        look_ups: Mapping[str, ReceiptLookup],
        *,
        seconds: float = TURN_SECONDS,
        ask_seconds: float = ASK_SECONDS,
        backoff: float = BACKOFF_SECONDS,
    ) -> None:
        self._dsn = dsn
        self._actor = f"look-up by {owner}"[:200].strip()
        self._look_ups = dict(look_ups)
        self._seconds = seconds
        self._ask_seconds = ask_seconds
        self._backoff = backoff
        self._may_escalate = True
        self._may_archive = True
        self._archiving = Archiving(owner=uuid4())
        self._may_look_up = bool(look_ups)
        self._escalate_at = 0.0
        self._asking: list[Future[object]] = []
        self._told: type[Exception] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fencepost-upkeep", daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def stop(self, within: float = 5.0) -> None:
        """Ends the thread, waiting at most ``within`` seconds for a step under way; an open question is asked again later."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(within)

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause) and self._may_anything():
            try:
                with connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
                    pause = self._seconds
                    while not self._stopping.is_set() and self._may_anything():
                        asked = self.turn(conn)
                        self._told = None
                        if asked < ASKED_MAX:
                            self._stopping.wait(self._seconds)
            except Exception as error:  # noqa: BLE001 (no machine that is short of something ends the upkeep for good)
                pause = min(max(pause, self._seconds) * 2, PAUSE_SECONDS_MAX)
                if type(error) is not self._told:
                    self._told = type(error)
                    log.warning("no upkeep of effects for now: %s", type(error).__name__)

    def _may_anything(self) -> bool:
        return self._may_escalate or self._may_look_up or self._may_archive

    def turn(self, conn: Connection[Any]) -> int:
        """One bounded share of the work, on an autocommit connection; how many effects providers were asked about."""
        if self._may_escalate and time.monotonic() >= self._escalate_at:
            try:
                if count := escalation.escalate(conn):
                    log.warning("%d unknown effects were escalated; see: fencepost effects list", count)
                self._escalate_at = time.monotonic() + ESCALATE_SECONDS
            except psycopg.errors.InsufficientPrivilege:
                self._may_escalate = False
                log.info(
                    "this login may not escalate effects; grant it the role maintenance, or let another worker do it"
                )
        asked = 0
        if self._may_look_up:
            try:
                asked = self._look_up(conn)
            except psycopg.errors.InsufficientPrivilege:
                self._may_look_up = False
                log.info(
                    "this login may not reconcile by look-up; grant it the role reconciler, or let another worker do it"
                )
        if self._may_archive:
            try:
                if count := self._archiving.turn(conn):
                    log.info("%d finished jobs were archived", count)
            except psycopg.errors.InsufficientPrivilege:
                self._may_archive = False
                log.info("this login may not archive finished jobs; whoever has the role maintenance does it")
        return asked

    def _look_up(self, conn: Connection[Any]) -> int:
        # Invariant: no transaction is open while a provider is asked; the connection is in autocommit.
        self._asking = [future for future in self._asking if not future.done()]
        free = ASKED_MAX - len(self._asking)
        if free == 0:
            return 0
        taken = lookup.take(
            conn,
            list(self._look_ups),
            uuid4(),
            limit=free,
            lease=self._ask_seconds + LEASE_MARGIN_SECONDS,
            patience=self._ask_seconds,
        )
        asked = [(each, self._ask(each.asked)) for each in taken]
        self._asking += [future for _, future in asked]
        for each, future in asked:
            self._conclude(conn, each, self._answer(each.asked, future))
        return len(taken)

    def _ask(self, asked: Asked) -> Future[object]:
        look_up = self._look_ups[asked.job_class]

        def ask() -> object:
            answer = look_up(asked)
            if inspect.isawaitable(answer):

                async def awaited() -> Answer:
                    async with asyncio.timeout(asked.seconds_left()):
                        return await answer

                return asyncio.run(awaited())
            return answer

        return abandonable(ask)

    def _answer(self, asked: Asked, future: Future[object]) -> Answer:
        """What was answered in time; anything else is inconclusive."""
        try:
            answer = future.result(timeout=asked.seconds_left())
        except NotInTime:
            return Inconclusive("no_answer")
        except BaseException as error:  # noqa: BLE001 (whatever it raises, it is no evidence)
            log.warning(
                "the look-up of class %s raised %s: counts as inconclusive", asked.job_class, type(error).__name__
            )
            return Inconclusive("raised")
        return answer if isinstance(answer, Landed | DidNotHappen | Inconclusive) else Inconclusive("not_an_answer")

    def _conclude(self, conn: Connection[Any], taken: Taken, answer: Answer) -> None:
        asked = taken.asked
        if isinstance(answer, Inconclusive):
            lookup.defer(conn, taken, answer.reason, self._delay(asked.asks))
            return
        decision: UUID = uuid4()
        try:
            became = lookup.settle(conn, taken, answer, decision_id=decision, actor=self._actor)
        except NotQuiescent:
            # The answer may have been overtaken by the call: asked again, once a negative answer counts.
            lookup.defer(
                conn, taken, "not_quiescent", min(taken.quiescent_in + QUIESCENT_MARGIN_SECONDS, DELAY_SECONDS_MAX)
            )
        except (NotUnknown, WrongVersion, StaleEffectAttempt):
            return
        except (EvidenceMissing, InvalidInput) as refused:
            log.error("the look-up of class %s gave evidence that is refused [%s]", asked.job_class, refused.field)
            lookup.defer(conn, taken, "evidence_refused", self._delay(asked.asks))
        else:
            log.info(
                "effect %s of tenant %s, operation %s is %s by look-up",
                *(asked.effect_key, asked.tenant, asked.operation, became),
            )

    def _delay(self, asks: int) -> float:
        """Doubled with every question up to the cap, then spread over the upper half."""
        longest = min(BACKOFF_SECONDS_MAX, self._backoff * 2.0 ** min(asks - 1, 30))
        return longest * random.uniform(0.5, 1.0)
