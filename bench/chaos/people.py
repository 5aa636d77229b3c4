"""An operator: cancels at random, queues poison anew, and settles by evidence from the ledger what no look-up can settle.

Settings: CHAOS_DATABASE, CHAOS_LEDGER, CHAOS_SEED. May be killed at any moment; decisions are the database's.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from bench.chaos.plan import subject
from bench.chaos.provider import Accepted, read
from psycopg.rows import dict_row

from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.reconcile import reconcile
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import (
    EffectOpen,
    NotArmed,
    NotQuiescent,
    NotUnknown,
    StaleFence,
    Unreachable,
    WrongVersion,
)

TURN_SECONDS = 0.2
ACTOR = "ann"
CHANGED = (EffectOpen, NotArmed, NotQuiescent, NotUnknown, StaleFence, WrongVersion)

# Quiescence is read before the ledger is: what is not in there by then will never be.
UNKNOWN: LiteralString = """
SELECT e.tenant, e.operation, e.effect_key, e.version, e.quiescent_at <= clock_timestamp() AS quiescent
FROM fencepost.effect AS e JOIN chaos_accepted AS a ON a.operation = e.operation
WHERE e.state = 'unknown' AND (e.kind = 'opaque' OR e.contradicted) AND NOT a.leave LIMIT 200"""
DROPPABLE: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.exec FROM chaos_accepted AS a
JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
WHERE a.drop AND j.exec NOT IN ('done', 'cancelled')
  AND NOT EXISTS (SELECT FROM fencepost.decision AS d WHERE d.tenant = j.tenant AND d.operation = j.operation AND d.kind = 'requeue')
LIMIT 200"""
STOPPED: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.exec FROM chaos_accepted AS a
JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
WHERE j.open_effects = 0 AND (
    j.exec = 'poison' AND NOT a.bad
    OR j.exec = 'cancelled' AND a.again AND NOT EXISTS (
        SELECT FROM fencepost.decision AS d WHERE d.tenant = j.tenant AND d.operation = j.operation AND d.kind = 'requeue'))
LIMIT 200"""

Conn = psycopg.Connection[Any]


class People:
    """One turn looks at everything that waits for a person."""

    def __init__(self, ledger: Path, seed: str) -> None:
        self._ledger = ledger
        self._mood = random.Random(f"{seed}-{os.getpid()}")

    def turn(self, conn: Conn) -> None:
        """Each decision in a transaction of its own; what changed meanwhile is looked at again next time."""
        self._cancel(conn)
        self._requeue(conn)
        self._settle(conn)

    def _cancel(self, conn: Conn) -> None:
        for job in self._rows(conn, DROPPABLE):
            # Under way is when it matters.
            if self._mood.random() < (0.02 if job["exec"] == "queued" else 0.4):
                with conn.transaction():
                    cancel(conn, job["tenant"], job["operation"], job["class"], actor=ACTOR, reason="not wanted")

    def _requeue(self, conn: Conn) -> None:
        for job in self._rows(conn, STOPPED):
            try:
                with conn.transaction():
                    requeue(conn, job["tenant"], job["operation"], job["class"], actor=ACTOR, reason="once more")
            except CHANGED:
                continue

    def _settle(self, conn: Conn) -> None:
        unknown = self._rows(conn, UNKNOWN)
        entries: dict[str, Accepted] = {each.subject: each for each in read(self._ledger)[0]} if unknown else {}
        for effect in unknown:
            found = entries.get(subject(effect["operation"], effect["effect_key"]))
            if found is None and not effect["quiescent"]:
                continue
            try:
                with conn.transaction():
                    reconcile(
                        conn,
                        effect["tenant"],
                        effect["operation"],
                        effect["effect_key"],
                        version=effect["version"],
                        verdict="not_applied" if found is None else "applied",
                        evidence_kind="provider_statement",
                        evidence_ref="ledger: no such line" if found is None else f"ledger: {found.receipt}",
                        receipt=None if found is None else found.receipt,
                        actor=ACTOR,
                        reason="looked into the ledger",
                    )
            except CHANGED:
                continue

    def _rows(self, conn: Conn, query: LiteralString) -> list[dict[str, Any]]:
        with conn.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query).fetchall()


def main() -> None:
    """Until SIGTERM; a database that is away or disarmed is waited for."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    people = People(Path(os.environ["CHAOS_LEDGER"]), os.environ["CHAOS_SEED"])
    sys.stdout.write("at work\n")
    sys.stdout.flush()
    while not stop.wait(TURN_SECONDS):
        try:
            with connect(os.environ["CHAOS_DATABASE"], autocommit=True, answer_within=10.0) as conn:
                while not stop.wait(TURN_SECONDS):
                    people.turn(conn)
        except (psycopg.OperationalError, Unreachable, NotArmed):
            continue


if __name__ == "__main__":
    main()
