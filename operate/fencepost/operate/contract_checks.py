"""Checks of the server and of the database contract: version, encoding, pooler, migrations, functions, roles."""

from __future__ import annotations

import time
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
from psycopg import Connection
from psycopg.errors import InsufficientPrivilege
from psycopg.rows import scalar_row

from fencepost.operate.findings import Finding, fail, ok, warn
from fencepost.schemas import contract, grants, migrate, privileges
from fencepost.schemas.connect import ANSWER_SECONDS, connect
from fencepost.schemas.errors import ContractMismatch

__all__ = ["definers", "doorbell", "encoding", "installed", "migrations", "pooler", "public", "roles", "server"]

NEWEST_TESTED = 18
NAMES_MAX = 5
RING_SECONDS = 2.0

ENCODING: LiteralString = "SELECT current_setting('server_encoding')"
BACKEND: LiteralString = "SELECT pg_backend_pid()"
LISTEN: LiteralString = "LISTEN fencepost_check"
RING: LiteralString = "SELECT pg_notify('fencepost_check', %(word)s)"
INSTALLED: LiteralString = "SELECT to_regclass('fencepost.installation') IS NOT NULL"
INSTALLATIONS: LiteralString = "SELECT count(*) FROM fencepost.installation"
USAGE: LiteralString = "SELECT has_schema_privilege('fencepost', 'USAGE')"
ROLES: LiteralString = """
SELECT i.name, i.single_role, (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user)
FROM fencepost.installation AS i"""
EXISTING_ROLES: LiteralString = "SELECT rolname FROM pg_roles WHERE rolname = ANY (%(names)s)"
# Without an entry of its own a function has the default privileges, and PUBLIC may execute it.
PUBLIC: LiteralString = """
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'fencepost'::regnamespace
  AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) AS a
                                   WHERE a.grantee = 0 AND a.privilege_type = 'EXECUTE'))
ORDER BY p.proname"""
DEFINERS: LiteralString = """
SELECT p.proname, coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)
FROM pg_proc AS p WHERE p.pronamespace = 'fencepost'::regnamespace AND p.prosecdef ORDER BY p.proname"""


def server(conn: Connection[Any]) -> Finding:
    """PostgreSQL 15 to 18."""
    number = conn.info.server_version
    name = f"PostgreSQL {number // 10000}.{number % 10000}"
    if number < migrate.OLDEST_SERVER:
        return fail("server", f"{name} is too old; use {migrate.OLDEST_SERVER // 10000} or newer")
    if number // 10000 > NEWEST_TESTED:
        return warn("server", f"{name} is newer than what this version was tested with ({NEWEST_TESTED})")
    return ok("server", name)


def encoding(conn: Connection[Any]) -> Finding:
    """UTF8, since identities are compared as text."""
    found = _value(conn, ENCODING)
    if found != "UTF8":
        return fail("encoding", f"{found}; create a database with ENCODING 'UTF8' and move there")
    return ok("encoding", "UTF8")


def pooler(conn: Connection[Any], dsn: str) -> Finding:
    """Whether somebody else's session answers: a pooler gives a client another process number than the server's own.

    It must keep a transaction together; asked on a connection of its own, which such a pooler ends.
    """
    if _value(conn, BACKEND) == conn.info.backend_pid:
        return ok("pooler", "none: this is a direct connection")
    try:
        with connect(dsn) as other:
            together = _value(other, BACKEND) == _value(other, BACKEND)
    except psycopg.Error:
        together = False
    if not together:
        return fail(
            "pooler",
            "a pooler stands in between that keeps no transaction together (statement mode); set its pool_mode to"
            " transaction or session, or connect to the server itself",
        )
    return ok(
        "pooler",
        "a pooler stands in between; transaction mode is fine here, and your own connections need"
        " prepare_threshold=None there",
    )


def doorbell(conn: Connection[Any], dsn: str, answer: float = ANSWER_SECONDS) -> Finding:
    """Rings from one connection and listens on another: a pooler in transaction mode lets nothing through."""
    word = uuid4().hex
    with connect(dsn, autocommit=True, answer_within=answer) as listening:
        listening.execute(LISTEN)
        conn.execute(RING, {"word": word})
        until = time.monotonic() + RING_SECONDS
        while True:
            # Read once more after the deadline: whoever was suspended meanwhile finds it in the socket.
            left = max(0.0, until - time.monotonic())
            if any(found.payload == word for found in listening.notifies(timeout=left, stop_after=1)):
                return ok("doorbell", "a notification arrives")
            if left == 0:
                break
    return fail(
        "doorbell", "no notification arrives: connect to the server itself, not to a pooler in transaction mode"
    )


def installed(conn: Connection[Any]) -> Finding | None:
    """None when the installation is there and may be looked at; else nothing else can be."""
    try:
        if not _value(conn, INSTALLED):
            return fail("migrations", "none is applied in this database; run `fencepost migrate`")
        if not _value(conn, INSTALLATIONS):
            return fail("migrations", "applied, but nothing was installed; run `fencepost migrate`")
    except InsufficientPrivilege as error:
        if _value(conn, USAGE):
            return None
        return fail("migrations", f"{error.diag.message_primary}; grant this login one of the installation's roles")
    return None


def migrations(conn: Connection[Any]) -> Finding:
    """Ours are all applied, unchanged, none is of a newer version, and code and database may work together."""
    ours = {m.name: m.checksum for m in migrate.tables()}
    have = {str(name): str(checksum) for name, checksum in conn.execute(migrate.APPLIED)}
    pending = [n for n in ours if n not in have]
    edited = [n for n in ours if n in have and have[n] != ours[n]]
    unknown = [n for n in have if n not in ours]
    if edited:
        return fail(
            "migrations", f"{_names(edited)} differs from what was applied; install the version that applied it"
        )
    if pending:
        return fail("migrations", f"{_names(pending)} pending; run `fencepost migrate`")
    try:
        contract.require(conn)
    except ContractMismatch as error:
        return fail("migrations", f"{error.message}; {error.hint}")
    if unknown:
        return warn(
            "migrations",
            f"{_names(unknown)} is from a newer version, which serves this one still; upgrade this program",
        )
    return ok("migrations", f"{len(ours)} applied")


def public(conn: Connection[Any]) -> Finding:
    """Nobody may execute anything without being granted a role."""
    names = [str(r[0]) for r in conn.execute(PUBLIC)]
    if names:
        return fail("public", f"PUBLIC may execute {_names(names)}; run `fencepost migrate`, it revokes that again")
    return ok("public", "PUBLIC may execute nothing")


def definers(conn: Connection[Any]) -> Finding:
    """No function that runs as the owner can be led to a stranger's objects."""
    found = [(str(r[0]), bool(r[1])) for r in conn.execute(DEFINERS)]
    wrong = [name for name, right in found if not right]
    if wrong:
        return fail(
            "search_path",
            f"{_names(wrong)} without search_path = pg_catalog, pg_temp; run `fencepost migrate`, it sets that again",
        )
    return ok("search_path", f"pg_catalog, pg_temp in all {len(found)} SECURITY DEFINER functions")


def roles(conn: Connection[Any]) -> Finding:
    """Separated, and all there; a superuser steps around every check."""
    row = conn.execute(ROLES).fetchone()
    if row is None:
        return fail("roles", "nothing was installed; run `fencepost migrate`")
    install, single, superuser = str(row[0]), bool(row[1]), bool(row[2])
    if single:
        return warn(
            "roles",
            "not separated (single role): fine on a machine of your own; else `fencepost grants apply --separate-roles`",
        )
    names = [grants.role(install, name) for name in ("owner", *grants.ROLES)]
    have = {str(r[0]) for r in conn.execute(EXISTING_ROLES, {"names": names})}
    missing = [n for n in names if n not in have]
    if missing:
        return fail("roles", f"{_names(missing)} missing; run `fencepost grants apply`")
    if found := privileges.differences(conn, install):
        return fail(
            "roles",
            f"{_names([str(d) for d in found])}; see `fencepost grants verify`, set right with `fencepost grants apply`",
        )
    if superuser:
        return warn("roles", "separated, but this login is a superuser; run relay and workers with logins of their own")
    return ok("roles", f"separated, {len(names)} roles of installation {install}")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def _value(conn: Connection[Any], statement: LiteralString) -> object:
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(statement).fetchone()
