"""An installation with separated roles and logins for them; everything cluster-wide is gone at the end."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.schemas import grants, migrate
from support.database import Database, Databases


@dataclass(slots=True)
class Roles:
    """A database whose roles are separated; `login(...)` makes one that is a member of the named roles only."""

    database: Database
    install: str
    logins: list[str] = field(default_factory=list[str])

    def login(self, *roles: str) -> Database:
        """The same database by a new login."""
        name = self.name(*roles)
        with self.database.connect(autocommit=True) as conn:
            if name not in self.logins:
                conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
                self.logins.append(name)
            for role in roles:
                conn.execute(
                    sql.SQL("GRANT {} TO {}").format(
                        sql.Identifier(grants.role(self.install, role)), sql.Identifier(name)
                    )
                )
        return Database(make_conninfo(self.database.dsn, user=name), self.database.state)

    def name(self, *roles: str) -> str:
        """The name of the login that is a member of these roles."""
        return f"{self.install}_{'_'.join(roles)}"

    def role(self, name: str) -> str:
        """The full name of a role."""
        return grants.role(self.install, name)


@contextlib.contextmanager
def separated(databases: Databases, *, migrated: bool = True) -> Generator[Roles]:
    """A new installation; its database is dropped before its roles."""
    database = databases.empty()
    made = Roles(database, f"t{uuid.uuid4().hex[:8]}")
    try:
        if migrated:
            migrate.apply(database.dsn, state=database.state, single_role=False, install=made.install)
        yield made
    finally:
        with psycopg.connect(make_conninfo(database.dsn, dbname="postgres"), autocommit=True) as conn:
            databases.drop(database)
            for name in (*made.logins, *(made.role(r) for r in ("owner", *grants.ROLES))):
                conn.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))
