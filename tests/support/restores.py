"""Restores for tests: a copy of a database taken now stands for it later, beside the witness that went on."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs.authority import By
from fencepost.jobs.recovery import Recovered, recover
from fencepost.schemas import arming
from fencepost.schemas.witness import FileWitness
from support.database import Database, Databases

WHY = By("ann", "restored last night's copy", "ticket 7")


def copy_database(admin: psycopg.Connection[Any], source: str, name: str) -> None:
    """A copy of a database under this name, whoever is at work there."""
    with _alone(admin, source):
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(source)))


@dataclass(slots=True)
class Restores:
    """A database of this test's own; `live` is what the witness has seen last."""

    live: Database
    copies: list[str] = field(default_factory=list[str])

    def backup(self) -> str:
        """A copy of the live database as it is; it goes on, and its witness with it."""
        name = self.copy()
        with self.live.connect(autocommit=True) as conn:
            # The beat that comes every two seconds.
            arming.beat(conn, FileWitness(self.live.state))
        return name

    def copy(self) -> str:
        """A copy of the live database as it is."""
        name = f"fp_copy_{uuid.uuid4().hex[:12]}"
        source = str(conninfo_to_dict(self.live.dsn)["dbname"])
        with self.admin() as conn:
            copy_database(conn, source, name)
        self.copies.append(name)
        return name

    def restored(self, backup: str) -> Database:
        """That copy in the live one's place: as old as it is, under the witness as it is now."""
        return Database(make_conninfo(self.live.dsn, dbname=backup), self.live.state)

    @contextmanager
    def admin(self) -> Generator[psycopg.Connection[Any]]:
        with psycopg.connect(make_conninfo(self.live.dsn, dbname="postgres"), autocommit=True) as conn:
            yield conn

    def close(self) -> None:
        with self.admin() as conn:
            for name in self.copies:
                conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def _alone(conn: psycopg.Connection[Any], name: str) -> Generator[None]:
    """Nobody is in that database, and nobody comes in: those who use it may be at work meanwhile."""
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    conn.execute(allow.format(sql.Identifier(name), sql.SQL("false")))
    try:
        conn.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (name,))
        yield
    finally:
        conn.execute(allow.format(sql.Identifier(name), sql.SQL("true")))


@contextmanager
def restores(databases: Databases) -> Generator[Restores]:
    """A new database and what is restored of it; all gone at the end."""
    made = Restores(databases.migrated())
    try:
        yield made
    finally:
        made.close()
        databases.drop(made.live)


def recovered(database: Database, **options: Any) -> Recovered:
    """The recovery of a restored database."""
    return recover(database.dsn, database.state, WHY, **options)
