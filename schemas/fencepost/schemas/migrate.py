"""The database contract, applied: numbered table migrations that never change, functions that are applied every time.

One transaction under one lock: two runs at once do the work once, a failed run leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

from psycopg import Connection, sql

from fencepost.schemas import arming, contract, grants
from fencepost.schemas.connect import connect, is_loopback
from fencepost.schemas.errors import ConfigError, ContractMismatch, NotArmed, WitnessMismatch
from fencepost.schemas.witness import Witness

OLDEST_SERVER = 150000
LOCK = "SELECT pg_advisory_xact_lock(7310579032614957)"
WAIT = "SELECT set_config('lock_timeout', %(longest)s, true)"
OTHER_RUN_WAIT = "10min"
TABLE_WAIT = "10s"
LEDGER = """CREATE TABLE IF NOT EXISTS fencepost.migration (
    name text PRIMARY KEY, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"""
APPLIED = "SELECT name, checksum FROM fencepost.migration ORDER BY name"
DECLARES = "SELECT to_regprocedure('fencepost.contract()') IS NOT NULL"
RECORD = "INSERT INTO fencepost.migration (name, checksum) VALUES (%(name)s, %(checksum)s)"
INSTALLED = "SELECT i.name, i.single_role, t.seq FROM fencepost.installation AS i, fencepost.tip AS t"
INSTALL = """INSERT INTO fencepost.installation (id, name, slots, single_role)
             VALUES (%(id)s, %(name)s, %(slots)s, %(single_role)s)"""
FIRST_TIP = "INSERT INTO fencepost.tip (seq, nonce) VALUES (0, %(nonce)s)"
FIRST_LOG = "SELECT fencepost._log_authority('created', jsonb_build_object('installation', %(id)s::text))"
# Invariant: no event exists yet, so the first tick precedes every event.
FIRST_TICK = """INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
    SELECT 1, 0, s, 0, pg_current_xact_id(), pg_snapshot_xmax(s), ARRAY(SELECT pg_snapshot_xip(s))
    FROM pg_current_snapshot() AS s"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of the contract with the checksum that must never change after a release."""

    name: str
    text: bytes

    @property
    def checksum(self) -> str:
        """sha256 of the file."""
        return hashlib.sha256(self.text).hexdigest()


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did; `armed` says whether this database may exercise authority now, else `message` says why not."""

    applied: tuple[str, ...]
    created: bool
    armed: bool
    single_role: bool
    state: Path | Witness
    message: str


@dataclass(frozen=True, slots=True)
class State:
    """Which migrations the database has, and which of ours it lacks."""

    applied: tuple[str, ...]
    pending: tuple[str, ...]


def tables() -> list[Migration]:
    """The numbered migrations, in order."""
    return _files("tables")


def functions() -> list[Migration]:
    """One file per transition, in a fixed order; applied at every run."""
    return _files("functions")


def apply(
    dsn: str, *, state: Path | Witness, single_role: bool | None = None, install: str = "main", slots: int = 16
) -> Report:
    """Brings the database to this version of the contract and arms a new installation; safe to run again and twice at once.

    `state` is the folder of the file witness, or another witness, `slots` the number of ordered shares of the outbox (fixed for life),
    `single_role` leaves out the roles (default: on loopback). Raises `ConfigError` for a server older than 15, another
    encoding than UTF8 or an edited migration, `ContractMismatch` for a database that a newer version has migrated (its
    functions are not taken back), `Unreachable` when nobody answers.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,20}", install):
        raise ConfigError(
            "the installation's name is not lower-case letters, digits and _ (at most 21)", field="install"
        )
    if single_role is None:
        single_role = is_loopback(dsn)
    with connect(dsn) as conn:
        _require_server(conn)
        # Another run may need minutes for a large database; a table is waited for briefly, since others queue up behind us.
        conn.execute(WAIT, {"longest": OTHER_RUN_WAIT})
        conn.execute(LOCK)
        conn.execute(WAIT, {"longest": TABLE_WAIT})
        created, single_role, install = _schema(conn, single_role, install)
        _require_not_newer(conn)
        applied = _tables(conn)
        conn.execute("SET LOCAL check_function_bodies = off")
        for function in functions():
            conn.execute(function.text)
        conn.execute("REVOKE ALL ON ALL ROUTINES IN SCHEMA fencepost FROM PUBLIC")
        if created:
            _install(conn, install, slots, single_role)
        if not single_role:
            grants.apply(conn, install)
        row = conn.execute(INSTALLED).fetchone()
        assert row is not None
        never_armed = row[2] == 0
    armed, message = _arm(dsn, state, never_armed)
    return Report(applied, created, armed, single_role, state, message)


def status(dsn: str) -> State:
    """Which migrations are applied and which are pending; changes nothing."""
    with connect(dsn, autocommit=True) as conn:
        found = conn.execute("SELECT to_regclass('fencepost.migration') IS NOT NULL").fetchone()
        have = {str(r[0]) for r in conn.execute(APPLIED)} if found and found[0] else set[str]()
    ours = [m.name for m in tables()]
    return State(tuple(n for n in ours if n in have), tuple(n for n in ours if n not in have))


def script() -> str:
    """The whole contract as SQL text, for those who review or apply it with a tool of their own."""
    parts = ["CREATE SCHEMA fencepost;", LEDGER + ";"]
    for migration in tables():
        parts.append(f"-- {migration.name}\n{migration.text.decode()}")
        parts.append(
            f"INSERT INTO fencepost.migration (name, checksum) VALUES ('{migration.name}', '{migration.checksum}');"
        )
    parts.append("SET check_function_bodies = off;")
    parts += [f"-- {f.name}\n{f.text.decode()}" for f in functions()]
    parts.append("REVOKE ALL ON ALL ROUTINES IN SCHEMA fencepost FROM PUBLIC;")
    return "\n\n".join(parts) + "\n"


def _files(kind: str) -> list[Migration]:
    root = files("fencepost.schemas") / "sql" / kind
    found: list[Migration] = []
    for entry in root.iterdir():
        if entry.is_dir():
            found += [Migration(f"{entry.name}/{f.name}", f.read_bytes()) for f in entry.iterdir()]
        else:
            found.append(Migration(entry.name, entry.read_bytes()))
    return sorted(found, key=lambda m: m.name)


def _require_server(conn: Connection[tuple[Any, ...]]) -> None:
    if conn.info.server_version < OLDEST_SERVER:
        raise ConfigError(
            f"PostgreSQL {conn.info.server_version // 10000} is too old", field="database", hint="use 15 or newer"
        )
    row = conn.execute("SELECT current_setting('server_encoding')").fetchone()
    if row is None or row[0] != "UTF8":
        raise ConfigError(
            "the database's encoding is not UTF8", field="database", hint="CREATE DATABASE ... ENCODING 'UTF8'"
        )


def _require_not_newer(conn: Connection[tuple[Any, ...]]) -> None:
    """Functions are applied at every run: an older program would put its own in the place of the newer ones."""
    row = conn.execute(DECLARES).fetchone()
    found = contract.read(conn) if row == (True,) else None
    ours = {m.name for m in tables()}
    unknown = [str(name) for name, _ in conn.execute(APPLIED) if name not in ours]
    if unknown or (found is not None and found.version > contract.CONTRACT):
        has = f"contract {found.version}" if not unknown and found is not None else unknown[0]
        raise ContractMismatch(
            f"a newer version has migrated this database (it has {has}); nothing was changed",
            field="program",
            hint="migrate with the newest version; older programs go on working for as long as it serves them",
        )


def _schema(conn: Connection[tuple[Any, ...]], single_role: bool, install: str) -> tuple[bool, bool, str]:
    """The schema and its owner; returns (created, single_role, install), the latter two as first installed."""
    found = conn.execute("SELECT to_regclass('fencepost.installation') IS NOT NULL").fetchone()
    # Tables without an installation in them were made from the printed script.
    row = conn.execute(INSTALLED).fetchone() if found and found[0] else None
    created = row is None
    if row is not None:
        install, single_role = str(row[0]), bool(row[1])
    if single_role:
        conn.execute("CREATE SCHEMA IF NOT EXISTS fencepost")
    else:
        grants.create_roles(conn, install)
        owner = sql.Identifier(grants.role(install, "owner"))
        # Where it is there, one who may not create schemas can bring it to the next version.
        if conn.execute("SELECT to_regnamespace('fencepost') IS NULL").fetchone() == (True,):
            conn.execute(sql.SQL("CREATE SCHEMA fencepost AUTHORIZATION {}").format(owner))
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(owner))
    conn.execute(LEDGER)
    return created, single_role, install


def _tables(conn: Connection[tuple[Any, ...]]) -> tuple[str, ...]:
    have = {str(name): str(checksum) for name, checksum in conn.execute(APPLIED)}
    applied: list[str] = []
    for migration in tables():
        if migration.name not in have:
            conn.execute(migration.text)
            conn.execute(RECORD, {"name": migration.name, "checksum": migration.checksum})
            applied.append(migration.name)
        elif have[migration.name] != migration.checksum:
            raise ConfigError(
                f"migration {migration.name} is not the one that was applied",
                field="migration",
                hint="released migrations never change: install the version that applied it, or restore the file",
            )
    return tuple(applied)


def _install(conn: Connection[tuple[Any, ...]], install: str, slots: int, single_role: bool) -> None:
    if not 1 <= slots <= 1024:
        raise ConfigError("slots is not between 1 and 1024", field="slots")
    installation = uuid4()
    conn.execute(INSTALL, {"id": installation, "name": install, "slots": slots, "single_role": single_role})
    conn.execute(FIRST_TIP, {"nonce": uuid4()})
    conn.execute(FIRST_LOG, {"id": installation})
    conn.execute(FIRST_TICK)


def _arm(dsn: str, state: Path | Witness, never_armed: bool) -> tuple[bool, str]:
    witness = arming.as_witness(state)
    if never_armed and not witness.exists():
        arming.create_witness(dsn, witness)
    try:
        armed = arming.ensure_armed(dsn, witness)
    except (WitnessMismatch, NotArmed, ConfigError) as error:
        return False, arming.explain(error)
    if armed.already:
        return True, "armed already"
    return True, f"armed; the witness is {witness.place}"
