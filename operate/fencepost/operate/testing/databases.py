"""Databases for single tests: clones of a template migrated once per session, each with its own armed witness."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import tuple_row

from fencepost.schemas import arming, migrate
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import ConfigError, WrongTransaction

__all__ = ["Database", "Databases", "Domain", "require_made_here"]

ANSWER_SECONDS = 120.0
MARK = "fencepost test database"

OID: LiteralString = "SELECT oid::text FROM pg_database WHERE datname = %(name)s"
MADE: LiteralString = """
SELECT coalesce(shobj_description(d.oid, 'pg_database'), '') = %(mark)s || ' ' || d.oid
FROM pg_database AS d WHERE d.datname = current_database()"""

Domain = Callable[[str], None]
"""Makes the application's own tables in the database of this connection string, and closes its connections."""


@dataclass(frozen=True, slots=True)
class Database:
    """A database of one test, with the folder of its witness; the address may hold a password and is not shown."""

    dsn: str = field(repr=False)
    state: Path

    def connect(self, *, autocommit: bool = False, **options: Any) -> Connection[tuple[Any, ...]]:
        """A new connection as the user that made the database; use it as a context manager."""
        return psycopg.connect(self.dsn, autocommit=autocommit, connect_timeout=10, **options)


class Databases:
    """Makes and drops databases on one server; names are random, so a shared server is left as it was found.

    ``dsn`` names a database of that server to make others from; nothing is written there. Its user needs CREATEDB.
    ``domain`` is called once, for the template. Raises Unreachable when nobody answers.
    """

    def __init__(self, dsn: str, folder: Path, domain: Domain | None = None) -> None:
        self._dsn = dsn
        self._folder = folder
        self._domain = domain
        self._template = ""

    def empty(self) -> Database:
        """A database without our schema."""
        return self._create("fp_empty", None)

    def migrated(self) -> Database:
        """A clone of the migrated template with a clone of its witness, armed."""
        template = self._template or self._migrate()
        database = self._create("fp_test", template)
        arming.clone_witness(self._folder / template, database.state, database.dsn)
        arming.arm(database.dsn, database.state)
        return database

    def drop(self, database: Database) -> None:
        """Drops the database with everything connected to it, and its witness."""
        self._drop(database.state.name)

    def close(self) -> None:
        """Drops the template."""
        if self._template:
            self._drop(self._template)

    def _migrate(self) -> str:
        template = self._create("fp_template", None)
        try:
            migrate.apply(template.dsn, state=template.state, single_role=True)
            if self._domain is not None:
                self._domain(template.dsn)
        except BaseException:
            self.drop(template)
            raise
        self._template = template.state.name
        return self._template

    def _create(self, prefix: str, template: str | None) -> Database:
        name = f"{prefix}_{uuid.uuid4().hex[:12]}"
        with connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
            if template is None:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            else:
                self._clone(conn, name, template)
            row = conn.execute(OID, {"name": name}).fetchone()
            assert row is not None
            conn.execute(sql.SQL("COMMENT ON DATABASE {} IS {}").format(sql.Identifier(name), f"{MARK} {row[0]}"))
        state = self._folder / name
        if template is None:
            state.mkdir(mode=0o700)
        return Database(make_conninfo(self._dsn, dbname=name), state)

    def _clone(self, conn: Connection[Any], name: str, template: str) -> None:
        try:
            conn.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            )
        except psycopg.errors.ObjectInUse:
            raise ConfigError(
                "the template database is still in use",
                field="fencepost_domain",
                hint="close every connection before the function returns (engine.dispose(), connection.close())",
            ) from None

    def _drop(self, name: str) -> None:
        with connect(self._dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        shutil.rmtree(self._folder / name, ignore_errors=True)


def require_made_here(conn: Connection[Any]) -> None:
    """Raises WrongTransaction (``database``) unless `Databases` made this database; a copy or a dump of it is not it.

    Invariant: the mark is a comment on the database with its own number; neither a clone nor a restore has that.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(MADE, {"mark": MARK}).fetchone()
    if row is None or not row[0]:
        raise WrongTransaction(
            "this database was not made by the fixture", field="database", hint="use a connection of fencepost_database"
        )
