"""A gate in the database: stops a SQL function at its label until it is opened or its session is ended."""

from __future__ import annotations

from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from crash.points import Point
from support.database import Database
from support.processes import wait_for

KEY = 4711
WAIT: LiteralString = """
CREATE OR REPLACE FUNCTION public.wait_at_the_gate() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    WHILE NOT pg_try_advisory_xact_lock_shared(4711) LOOP
        PERFORM pg_sleep(0.01);
    END LOOP;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD WHEN 'TRUNCATE' THEN NULL ELSE NEW END;
END $$"""
PLACE: LiteralString = """
CREATE TRIGGER gate BEFORE {event} ON {table} FOR EACH {each} EXECUTE FUNCTION public.wait_at_the_gate()"""
WAITING: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'PgSleep' AND position(%(call)s IN query) > 0"""
END: LiteralString = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'fencepost'"""


class Gate:
    """Stands before what the function writes at this label, open at first; a lock timeout does not end the wait."""

    def __init__(self, database: Database, point: Point, table: str = "") -> None:
        assert point.function and point.event, f"[{point.label}] is not in SQL"
        self._call = point.function + "("
        self._event = point.event
        self._table = table or point.table
        self._conn: psycopg.Connection[Any] = database.connect(autocommit=True)

    def __enter__(self) -> Self:
        self._conn.execute(WAIT)
        self._conn.execute(
            sql.SQL(PLACE).format(
                event=sql.SQL(self._event),  # pyright: ignore[reportArgumentType]
                table=sql.Identifier(*self._table.split(".")),
                each=sql.SQL("STATEMENT" if self._event == "TRUNCATE" else "ROW"),
            )
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conn.close()

    def shut(self) -> None:
        """Nobody gets through from here on."""
        self._conn.execute("SELECT pg_advisory_lock(%s)", (KEY,))

    def reached(self, times: int = 1) -> None:
        """Returns once so many calls of the function wait before its write."""
        wait_for(lambda: self._waiting() >= times, 20, f"{self._call}) to reach the gate")

    def settle(self, *, commits: bool) -> None:
        """After its client has died: what waits here goes on to its commit, or ends with its session."""
        if not commits:
            self._conn.execute(END)
            wait_for(lambda: self._waiting() == 0, 20, "the sessions to end")
        self._conn.execute("SELECT pg_advisory_unlock(%s)", (KEY,))

    def _waiting(self) -> int:
        row = self._conn.execute(WAITING, {"call": self._call}).fetchone()
        assert row is not None
        found: int = row[0]
        return found
