"""Databases for single tests: clones of a template migrated once per server, each with its own armed witness."""

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.schemas import arming, migrate


@dataclass(frozen=True, slots=True)
class Database:
    """A database of one test, with the folder of its witness."""

    dsn: str
    state: Path

    def connect(self, *, autocommit: bool = False, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """A new connection as superuser; use it as a context manager."""
        return psycopg.connect(self.dsn, autocommit=autocommit, connect_timeout=10, **options)


class Databases:
    """Makes and drops databases on one server; names are random, so a shared server is left as it was found."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._dsn = dsn
        self._folder = folder
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
        migrate.apply(template.dsn, state=template.state, single_role=True)
        self._template = template.state.name
        return self._template

    def _create(self, prefix: str, template: str | None) -> Database:
        name = f"{prefix}_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._dsn, autocommit=True, connect_timeout=10) as conn:
            if template is None:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            else:
                conn.execute(
                    sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
                        sql.Identifier(name), sql.Identifier(template)
                    )
                )
        state = self._folder / name
        if template is None:
            state.mkdir(mode=0o700)
        return Database(make_conninfo(self._dsn, dbname=name), state)

    def _drop(self, name: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True, connect_timeout=10) as conn:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        shutil.rmtree(self._folder / name, ignore_errors=True)
