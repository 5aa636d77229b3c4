"""Principals: who acts without a job, for which tenant, on work of which class; every change is in the history of authority.

A grant stands as long as the tenant's epoch: a rotation or a recovery ends it, so that no restore brings one back, and an
authority admin grants anew what shall go on. ``authority.restrict`` of a principal revokes all of it and is remembered by the
witness. Each change waits at most five seconds for those who use authority now (LockNotAvailable, and nothing has changed).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.rows import class_row, tuple_row

from fencepost.jobs.authority import By
from fencepost.schemas.identity import Epoch, as_class, as_tenant, as_text

__all__ = ["EVERY", "Granted", "grant", "granted", "register", "revoke"]

EVERY = "*"
REGISTER: LiteralString = """
SELECT fencepost.register_principal(%(principal)s, %(login)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"""
GRANT: LiteralString = """
SELECT fencepost.grant_principal(%(principal)s, %(tenant)s, %(class)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"""
REVOKE: LiteralString = """
SELECT fencepost.revoke_principal(%(principal)s, %(tenant)s, %(class)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"""
GRANTED: LiteralString = """
SELECT p.principal, p.login, g.tenant, g.class AS job_class, g.epoch, coalesce(g.since, p.since) AS since,
       CASE WHEN r.kind IS NOT NULL THEN 'revoked'
            WHEN g.principal IS NULL THEN 'nothing granted'
            WHEN g.epoch < greatest(i.floor, t.epoch) THEN 'old epoch'
            ELSE 'stands' END AS state
FROM fencepost.principal AS p
CROSS JOIN fencepost.installation AS i
LEFT JOIN fencepost.principal_grant AS g ON g.principal = p.principal
LEFT JOIN fencepost.tenant AS t ON t.tenant = g.tenant
LEFT JOIN fencepost.restriction AS r ON r.kind = 'principal' AND r.subject = p.principal
WHERE %(principal)s::text IS NULL OR p.principal = %(principal)s::text
ORDER BY p.principal, g.tenant, g.class LIMIT %(limit)s"""


@dataclass(frozen=True, slots=True)
class Granted:
    """One grant, or a principal that has none; ``*`` is every tenant, or every class.

    ``state``: stands, old epoch, revoked, nothing granted. One for every tenant stands for those that were not rotated since.
    """

    principal: str
    login: str | None
    tenant: str | None
    job_class: str | None
    epoch: int | None
    since: datetime
    state: str


def register(conn: Connection[Any], by: By, principal: str, *, login: str | None = None) -> None:
    """The principal is known once the caller commits; with ``login`` only its sessions may act as it.

    Again with another login it is that one's. It may do nothing before a grant. Raises NotArmed, WrongVersion, InvalidInput.
    """
    values = {"principal": as_text(principal, "principal"), "login": None if login is None else as_text(login, "login")}
    _one(conn, REGISTER, values | by.values())


def grant(conn: Connection[Any], by: By, principal: str, *, tenant: str, job_class: str) -> Epoch:
    """It may act for the tenant on work of the class (``*``: every one) once the caller commits, until the tenant's next epoch.

    Returns the newest epoch that the grant covers. Granting again covers the epoch of now. Raises NotArmed, WrongVersion,
    InvalidInput for an unknown principal.
    """
    wanted = job_class if job_class == EVERY else as_class(job_class)
    values = {"principal": as_text(principal, "principal"), "tenant": as_tenant(tenant), "class": wanted}
    return Epoch(_one(conn, GRANT, values | by.values()))


def revoke(
    conn: Connection[Any], by: By, principal: str, *, tenant: str | None = None, job_class: str | None = None
) -> int:
    """Nothing is done under these grants after the caller's commit; returns how many there were.

    ``tenant`` and ``job_class`` name a grant as it was given (None: whatever it is). Raises NotArmed, WrongVersion.
    """
    values = {"principal": as_text(principal, "principal"), "tenant": tenant, "class": job_class}
    return int(_one(conn, REVOKE, values | by.values()))


def granted(conn: Connection[Any], principal: str | None = None, *, limit: int = 1000) -> list[Granted]:
    """Who may do what, and whether that still stands; needs the role authority admin, reconciler or reader."""
    with conn.cursor(row_factory=class_row(Granted)) as cursor:
        return cursor.execute(GRANTED, {"principal": principal, "limit": limit}).fetchall()


def _one(conn: Connection[Any], statement: LiteralString, values: dict[str, object]) -> Any:
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return row[0]
