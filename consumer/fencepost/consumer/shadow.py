"""The shadow of a projection: empty copies of its tables in a schema of their own, and the swap that puts them in place.

Readers see the tables as they were until one transaction replaces all of them. Beside the projection's tables stand three
of the replay: ``<name>_replay`` (how far it has come), ``<name>_newest`` (the newest sequence of each key) and
``<name>_held`` (events that could not be read). They go wherever the tables go.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, cast

import psycopg
from psycopg import Connection, sql

from fencepost.consumer.projection import Projection
from fencepost.schemas.errors import ConfigError, ReplayRefused

__all__ = ["Shadow"]

log = logging.getLogger("fencepost.consumer.replay")

GIVE_UP_SECONDS = 30.0
# How long readers that come later wait behind a swap that waits; in the pause after it they go on.
LOCK_TIMEOUT = "500ms"
PAUSE_SECONDS = 1.0
SOON_SECONDS = 0.02
DROP_TIMEOUT = "10s"
# What is locked along with a table that is held, such as the sequence of an identity column: not waited for either.
HELD_TIMEOUT = "1ms"

FOUND: LiteralString = """
SELECT t, c.relkind IS NOT NULL, coalesce(c.relkind = 'r' AND c.relpersistence = 'p', false),
       coalesce(pg_has_role(session_user, c.relowner, 'USAGE'), false)
FROM unnest(%(tables)s::text[]) AS t
LEFT JOIN pg_class AS c ON c.relname = t AND c.relnamespace = to_regnamespace(%(schema)s)"""
# What a copy of the table would not have, or what would go on pointing at the old one.
OBSTACLES: LiteralString = """
WITH mine AS (SELECT c.oid, c.relname FROM pg_class AS c
              WHERE c.relnamespace = to_regnamespace(%(schema)s) AND c.relname = ANY (%(tables)s))
SELECT m.relname, 'the view ' || v.relname FROM mine AS m
JOIN pg_depend AS d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = m.oid AND d.classid = 'pg_rewrite'::regclass
JOIN pg_rewrite AS r ON r.oid = d.objid JOIN pg_class AS v ON v.oid = r.ev_class
UNION SELECT m.relname, 'the foreign key ' || k.conname FROM mine AS m
JOIN pg_constraint AS k ON k.contype = 'f' AND m.oid IN (k.conrelid, k.confrelid)
UNION SELECT m.relname, 'the trigger ' || t.tgname FROM mine AS m JOIN pg_trigger AS t ON t.tgrelid = m.oid AND NOT t.tgisinternal
UNION SELECT m.relname, 'the policy ' || p.polname FROM mine AS m JOIN pg_policy AS p ON p.polrelid = m.oid
UNION SELECT m.relname, 'inheritance' FROM mine AS m JOIN pg_inherits AS i ON m.oid IN (i.inhrelid, i.inhparent)
UNION SELECT m.relname, 'the publication ' || p.pubname FROM mine AS m
JOIN pg_publication_rel AS x ON x.prrelid = m.oid JOIN pg_publication AS p ON p.oid = x.prpubid
UNION SELECT m.relname, 'the sequence ' || s.relname || ' (use an identity column)' FROM mine AS m
JOIN pg_depend AS d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = m.oid AND d.classid = 'pg_class'::regclass
                   AND d.deptype = 'a'
JOIN pg_class AS s ON s.oid = d.objid AND s.relkind = 'S'
ORDER BY 1, 2"""
SCHEMA_EXISTS: LiteralString = "SELECT to_regnamespace(%(schema)s) IS NOT NULL"
INSIDE: LiteralString = """
SELECT c.relname FROM pg_class AS c
WHERE c.relnamespace = to_regnamespace(%(schema)s) AND c.relkind IN ('r', 'p', 'v', 'm', 'f') ORDER BY 1"""
GRANTED: LiteralString = """
SELECT a.grantee = 0, pg_get_userbyid(a.grantee), a.privilege_type, a.is_grantable
FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
WHERE c.oid = to_regclass(%(table)s) AND a.grantee <> c.relowner"""
GRANTED_COLUMNS: LiteralString = """
SELECT t.attname, a.grantee = 0, pg_get_userbyid(a.grantee), a.privilege_type, a.is_grantable
FROM pg_attribute AS t CROSS JOIN LATERAL aclexplode(t.attacl) AS a WHERE t.attrelid = to_regclass(%(table)s)"""
OPTIONS: LiteralString = """
SELECT o.option_name, o.option_value FROM pg_class AS c CROSS JOIN LATERAL pg_options_to_table(c.reloptions) AS o
WHERE c.oid = to_regclass(%(table)s)"""
SET_LOCK_TIMEOUT: LiteralString = "SELECT set_config('lock_timeout', %(wait)s, true)"

CREATE_REPLAY = sql.SQL("""
CREATE TABLE {} (
    source text NOT NULL, range text NOT NULL, mark text NOT NULL, partition integer PRIMARY KEY,
    first bigint NOT NULL, position bigint NOT NULL, last bigint NOT NULL CHECK (position BETWEEN first AND last),
    applied bigint NOT NULL DEFAULT 0, older bigint NOT NULL DEFAULT 0, passed_over bigint NOT NULL DEFAULT 0,
    moved_at timestamptz NOT NULL DEFAULT clock_timestamp())""")
CREATE_NEWEST = sql.SQL("""
CREATE TABLE {} (
    source text, tenant text, ordering_key text, sequence bigint NOT NULL, PRIMARY KEY (source, tenant, ordering_key))
    WITH (fillfactor = 50)""")
CREATE_HELD = sql.SQL("""
CREATE TABLE {} (
    partition integer, place bigint, reason text NOT NULL, field text, type text, version integer, tenant text,
    operation text, event_id uuid, PRIMARY KEY (partition, place))""")


Table = tuple[str, str]


class _InUse(Exception):
    """Somebody else has this table, its schema and name; ``waited`` for him in vain, or not at all."""

    def __init__(self, table: Table, *, waited: bool) -> None:
        super().__init__(".".join(table))
        self.table, self.waited = table, waited


@dataclass(frozen=True, slots=True)
class Shadow:
    """Where one projection is built; every method works in a transaction of its own."""

    projection: Projection[Any]
    conn: Connection[Any]

    def table(self, suffix: str) -> sql.Identifier:
        """One of the replay's own tables: replay, newest or held."""
        return sql.Identifier(self.projection.shadow, f"{self.projection.name}_{suffix}")

    @property
    def _own(self) -> list[str]:
        return [f"{self.projection.name}_{suffix}" for suffix in ("replay", "newest", "held")]

    def require_replaceable(self, *, drop_old: bool) -> None:
        """Refuses, before anything is made, tables that a swap could not replace without loss (`ReplayRefused`)."""
        projection = self.projection
        names = {"schema": projection.schema, "tables": list(projection.tables)}
        for name, there, ordinary, ours in self.conn.execute(FOUND, names):
            if not there:
                raise ConfigError(f"there is no table {projection.schema}.{name}", field="tables", hint="create it")
            if not ordinary:
                raise ConfigError(f"{projection.schema}.{name} is not an ordinary table", field="tables")
            if not ours:
                raise ReplayRefused(
                    f"{projection.schema}.{name} belongs to somebody else",
                    field="tables",
                    hint="make the replay's login, or a role of its own, the owner of the projection's tables",
                )
        if (found := self.conn.execute(OBSTACLES, names).fetchone()) is not None:
            raise ReplayRefused(
                f"{found[1]} hangs on {found[0]} and would not come along when it is replaced",
                field="tables",
                hint="remove it, or let it be made anew by whoever reads the table",
            )
        kept = sorted({*self._inside(projection.old)} & {*projection.tables, *self._own})
        if kept and not drop_old:
            raise ReplayRefused(
                f"schema {projection.old} still keeps what the last replay replaced ({', '.join(kept)})",
                field="old",
                hint="drop it with --drop-old",
            )

    def exists(self) -> bool:
        """Whether a build is there to go on with."""
        return f"{self.projection.name}_replay" in self._inside(self.projection.shadow)

    def discard(self) -> None:
        """Drops an unfinished build."""
        with self.conn.transaction():
            self._drop(self.projection.shadow)

    def create(self) -> None:
        """Makes the empty copies, all or none; ReplayRefused names the right that is missing."""
        projection = self.projection
        try:
            with self.conn.transaction():
                self._schema(projection.shadow)
                self._drop(projection.shadow)
                for name in projection.tables:
                    self.conn.execute(
                        sql.SQL("CREATE TABLE {} (LIKE {} INCLUDING ALL)").format(
                            sql.Identifier(projection.shadow, name), sql.Identifier(projection.schema, name)
                        )
                    )
                    self._store_alike(name)
                for suffix, statement in (("replay", CREATE_REPLAY), ("newest", CREATE_NEWEST), ("held", CREATE_HELD)):
                    self.conn.execute(statement.format(self.table(suffix)))
        except psycopg.errors.InsufficientPrivilege as error:
            raise ReplayRefused(
                f"{error.diag.message_primary}",
                field="shadow",
                hint=f"give the replay's login CREATE on the database, or schemas {projection.shadow} and {projection.old}",
            ) from None

    def swap(self, *, drop_old: bool) -> None:
        """Puts the copies in place of the tables in one transaction; who may read these may read them.

        Waits at most half a second for readers at a time, and half a minute in all; then ReplayRefused, and the build stays
        for another run. No reader is ever part of a deadlock with it.
        """
        for name in self.projection.tables:
            # Readers' first plans would else be made without knowing anything of the new tables.
            self.conn.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(self.projection.shadow, name)))
        first: Table | None = None
        until = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                with self.conn.transaction():
                    self._swap(first)
                break
            except (_InUse, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
                if time.monotonic() > until:
                    raise ReplayRefused(
                        f"the tables of {self.projection.name} were in use all the time",
                        field="tables",
                        hint="end long transactions that read them; the same command goes on with the swap",
                    ) from None
                pause = SOON_SECONDS * random.uniform(0.5, 1.5)
                if isinstance(error, _InUse):
                    first = error.table
                    if error.waited:
                        log.info("%s: %s is in use, tried again", self.projection.name, error)
                        pause = PAUSE_SECONDS
                time.sleep(pause)
            except psycopg.errors.InsufficientPrivilege as error:
                raise ReplayRefused(
                    f"{error.diag.message_primary}",
                    field="tables",
                    hint=f"the replay's login needs CREATE on schemas {self.projection.schema} and {self.projection.old}",
                ) from None
        if drop_old:
            # Locks: one table at a time. This wait outlasts the server's look for deadlocks, so it holds nothing meanwhile.
            try:
                for name in self._ours(self.projection.old):
                    with self.conn.transaction():
                        self.conn.execute(SET_LOCK_TIMEOUT, {"wait": DROP_TIMEOUT})
                        self._drop_one(self.projection.old, name)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                log.warning("%s: somebody still reads what was replaced; it is kept", self.projection.name)

    def _swap(self, first: Table | None) -> None:
        projection = self.projection
        kept = self._ours(projection.old)
        self._lock([(projection.old, name) for name in kept], first)
        self._schema(projection.old)
        for name in kept:
            self._drop_one(projection.old, name)
        present = self._inside(projection.schema)
        for name in (*projection.tables, *self._own):
            if name in projection.tables:
                self._grant_alike(name)
            if name in present:
                self._move(projection.schema, name, projection.old)
            self._move(projection.shadow, name, projection.schema)

    def _lock(self, kept: list[Table], first: Table | None) -> None:
        """Everything that a swap moves or drops; `_InUse` where it did not come, beginning with ``first``."""
        projection = self.projection
        present = self._inside(projection.schema)
        ours = [
            (projection.schema, name) for name in (*projection.tables, *(own for own in self._own if own in present))
        ]
        ours += [(projection.shadow, name) for name in (*projection.tables, *self._own)]
        # Locks: all before anything moves, so that no reader sees half of it. Invariant: only the first is waited for, when
        # nothing is held; so this is in no circle, whenever the server looks for deadlocks, and none is a reader's loss.
        self.conn.execute(SET_LOCK_TIMEOUT, {"wait": LOCK_TIMEOUT})
        for number, table in enumerate(sorted([*ours, *kept], key=lambda table: table != first)):
            at_once = sql.SQL(" NOWAIT" if number else "")
            try:
                self.conn.execute(
                    sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE{}").format(sql.Identifier(*table), at_once)
                )
            except psycopg.errors.LockNotAvailable:
                raise _InUse(table, waited=not number) from None
        self.conn.execute(SET_LOCK_TIMEOUT, {"wait": HELD_TIMEOUT})

    def _move(self, of: str, name: str, to: str) -> None:
        self.conn.execute(sql.SQL("ALTER TABLE {} SET SCHEMA {}").format(sql.Identifier(of, name), sql.Identifier(to)))

    def _store_alike(self, name: str) -> None:
        """What LIKE leaves out: fillfactor and its kind."""
        table = {"table": sql.Identifier(self.projection.schema, name).as_string(self.conn)}
        for option, value in self.conn.execute(OPTIONS, table).fetchall():
            self.conn.execute(
                sql.SQL("ALTER TABLE {} SET ({} = {})").format(
                    sql.Identifier(self.projection.shadow, name), sql.Identifier(option), sql.Literal(value)
                )
            )

    def _grant_alike(self, name: str) -> None:
        table = {"table": sql.Identifier(self.projection.schema, name).as_string(self.conn)}
        rows = [(None, *row) for row in self.conn.execute(GRANTED, table)]
        rows += [tuple(row) for row in self.conn.execute(GRANTED_COLUMNS, table)]
        for column, everybody, grantee, privilege, grantable in rows:
            right: sql.Composable = sql.SQL(cast(LiteralString, privilege))
            if column is not None:
                right = sql.SQL("{} ({})").format(right, sql.Identifier(column))
            self.conn.execute(
                sql.SQL("GRANT {} ON {} TO {}{}").format(
                    right,
                    sql.Identifier(self.projection.shadow, name),
                    sql.SQL("PUBLIC") if everybody else sql.Identifier(grantee),
                    sql.SQL(" WITH GRANT OPTION" if grantable else ""),
                )
            )

    def _schema(self, name: str) -> None:
        if self.conn.execute(SCHEMA_EXISTS, {"schema": name}).fetchone() == (False,):
            self.conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))

    def _drop(self, schema: str) -> None:
        """Drops what is ours in one of our schemas; anything else there stays."""
        for name in self._ours(schema):
            self._drop_one(schema, name)

    def _drop_one(self, schema: str, name: str) -> None:
        self.conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(schema, name)))

    def _ours(self, schema: str) -> list[str]:
        inside = self._inside(schema)
        return [name for name in (*self.projection.tables, *self._own) if name in inside]

    def _inside(self, schema: str) -> Sequence[str]:
        return [str(row[0]) for row in self.conn.execute(INSIDE, {"schema": schema})]
