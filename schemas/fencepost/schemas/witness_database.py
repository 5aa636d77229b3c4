"""The authority record in a second database: for several machines that share no folder.

Keep that database on another server, and out of every backup of the first one's: restored together with it, it says nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import Connection
from psycopg.types.json import Jsonb

from fencepost.schemas import witness as port
from fencepost.schemas.connect import address, connect
from fencepost.schemas.errors import ConfigError, Damaged, Unreachable
from fencepost.schemas.witness import Record

__all__ = ["DatabaseWitness"]

ANSWER_SECONDS = 15.0
FIELD = "FENCEPOST_WITNESS"

CREATE: tuple[LiteralString, ...] = (
    "CREATE SCHEMA IF NOT EXISTS fencepost_witness",
    """CREATE TABLE IF NOT EXISTS fencepost_witness.record (
    name text PRIMARY KEY, revision bigint NOT NULL DEFAULT 0, record jsonb)""",
    """CREATE TABLE IF NOT EXISTS fencepost_witness.holder (name text PRIMARY KEY)""",
)
THERE: LiteralString = "SELECT to_regclass('fencepost_witness.holder') IS NOT NULL"
FIRST: tuple[LiteralString, ...] = (
    "INSERT INTO fencepost_witness.record (name) VALUES (%(name)s) ON CONFLICT DO NOTHING",
    "INSERT INTO fencepost_witness.holder (name) VALUES (%(name)s) ON CONFLICT DO NOTHING",
)
PATIENCE: LiteralString = "SELECT set_config('lock_timeout', %(ms)s, true)"
HOLD: LiteralString = "SELECT FROM fencepost_witness.holder AS h WHERE h.name = %(name)s FOR UPDATE"
READ: LiteralString = "SELECT r.revision, r.record FROM fencepost_witness.record AS r WHERE r.name = %(name)s"
DURABLE: LiteralString = "SELECT set_config('synchronous_commit', 'on', true)"
WRITE: LiteralString = """
UPDATE fencepost_witness.record AS r SET record = %(record)s, revision = r.revision + 1
WHERE r.name = %(name)s AND r.revision = %(revision)s"""


class DatabaseWitness:
    """Survives anything that happens to the first database; every write is a compare-and-set in a commit of its own.

    One writer at a time: `held()` locks a row in a transaction that stays open, so a pooler in transaction mode does. ``name``
    tells the records of several installations apart. Creates its two tables when it is held for the first time.
    """

    def __init__(self, dsn: str, name: str = "main") -> None:
        self._dsn = dsn
        self._name = {"name": name}
        self._conn: Connection[Any] | None = None
        self._revision = 0

    @property
    def place(self) -> str:
        """Host, port and database, never a user or a password."""
        return address(self._dsn)

    def exists(self) -> bool:
        """True when there is a witness to ask."""
        with self._open() as conn:
            return _is_there(conn) and (conn.execute(READ, self._name).fetchone() or (0, None))[1] is not None

    @contextmanager
    def held(self) -> Generator[None]:
        """Exclusive use of the witness by this process, until the block ends or the process dies.

        Waits at most ten seconds for another process that holds it, then raises `Unreachable`.
        """
        with self._open() as conn, connect(self._dsn, answer_within=ANSWER_SECONDS) as holder:
            if not _is_there(conn):
                for statement in CREATE:
                    conn.execute(statement)
            for statement in FIRST:
                conn.execute(statement, self._name)
            self._hold(holder)
            self._conn = conn
            row = conn.execute(READ, self._name).fetchone()
            self._revision = 0 if row is None else row[0]
            try:
                yield
            finally:
                self._conn = None
                holder.rollback()

    def read(self) -> Record:
        """The record; raises `ConfigError` when there is none, `Damaged` when it cannot be read, `Unreachable`."""
        if self._conn is not None:
            return self._read(self._conn)
        with self._open() as conn:
            return self._read(conn)

    def write(self, record: Record) -> None:
        """Replaces the record that was read, durably; `Unreachable` when this process no longer holds the witness."""
        conn = self._conn
        if conn is None:
            raise Unreachable(f"the witness at {self.place} is not held", field=FIELD, hint="hold it, then write")
        with conn.transaction():
            conn.execute(DURABLE)
            values = self._name | {"record": Jsonb(port.dump(record)), "revision": self._revision}
            if conn.execute(WRITE, values).rowcount != 1:
                raise Unreachable(
                    f"the witness at {self.place} was changed by another process",
                    field=FIELD,
                    hint="it was lost while it was held; try again",
                )
        self._revision += 1

    def _hold(self, holder: Connection[Any]) -> None:
        holder.execute(PATIENCE, {"ms": str(max(1, int(port.HELD_SECONDS * 1000)))})
        try:
            holder.execute(HOLD, self._name)
        except psycopg.errors.LockNotAvailable:
            raise Unreachable(
                f"the witness at {self.place} is held by another process",
                field=FIELD,
                hint="a process that keeps it may be stopped in the middle; end it",
            ) from None

    def _read(self, conn: Connection[Any]) -> Record:
        row = conn.execute(READ, self._name).fetchone() if _is_there(conn) else None
        self._revision = 0 if row is None else row[0]
        if row is None or row[1] is None:
            raise ConfigError(
                f"there is no witness at {self.place}",
                field=FIELD,
                hint="name the database that `fencepost migrate` used; where it is lost: authority recover --epoch-floor",
            )
        try:
            return port.load(row[1])
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(
                f"the witness at {self.place} cannot be read",
                field=FIELD,
                hint="restore nothing over it; it takes authority recover --epoch-floor",
            ) from error

    def _open(self) -> Connection[Any]:
        return connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS)


def _is_there(conn: Connection[Any]) -> bool:
    return conn.execute(THERE).fetchone() == (True,)
