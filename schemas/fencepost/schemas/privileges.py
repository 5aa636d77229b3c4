"""What every role may do, asked of PostgreSQL itself and compared with the matrix: nothing more, nothing less.

Compared are effective rights (has_*_privilege, so whatever the way they came by), memberships of the whole closure,
attributes, owners, and grants to roles that the matrix does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection

from fencepost.schemas import grants
from fencepost.schemas.grants import FUNCTIONS, ROLES, TABLES, role

__all__ = ["Difference", "beyond", "differences"]

PUBLIC = "public"
KINDS = ["INSERT", "UPDATE", "REFERENCES", "DELETE", "TRUNCATE", "TRIGGER"]
MAINTAIN_SINCE = 170000

EXECUTES: LiteralString = """
SELECT r, p.proname, has_function_privilege(r, p.oid, 'EXECUTE')
FROM unnest(%(roles)s::text[]) AS r CROSS JOIN pg_proc AS p WHERE p.pronamespace = 'fencepost'::regnamespace"""
READS: LiteralString = """
SELECT r, c.relname, has_any_column_privilege(r, c.oid, 'SELECT')
FROM unnest(%(roles)s::text[]) AS r CROSS JOIN pg_class AS c
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"""
CHANGES: LiteralString = """
SELECT r, c.relname, k FROM unnest(%(roles)s::text[]) AS r
CROSS JOIN pg_class AS c CROSS JOIN unnest(%(kinds)s::text[]) AS k
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
  AND CASE WHEN k IN ('INSERT', 'UPDATE', 'REFERENCES') THEN has_any_column_privilege(r, c.oid, k)
           ELSE has_table_privilege(r, c.oid, k) END
UNION ALL
SELECT r, c.relname, k FROM unnest(%(roles)s::text[]) AS r
CROSS JOIN pg_class AS c CROSS JOIN unnest('{USAGE,SELECT,UPDATE}'::text[]) AS k
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind = 'S' AND has_sequence_privilege(r, c.oid, k)"""
SCHEMA: LiteralString = """
SELECT r, k, has_schema_privilege(r, 'fencepost', k)
FROM unnest(%(roles)s::text[]) AS r CROSS JOIN unnest('{USAGE,CREATE}'::text[]) AS k"""
ATTRIBUTES: LiteralString = """
SELECT a.rolname, k.name FROM pg_roles AS a
CROSS JOIN LATERAL (VALUES ('LOGIN', a.rolcanlogin), ('SUPERUSER', a.rolsuper), ('CREATEROLE', a.rolcreaterole),
                           ('REPLICATION', a.rolreplication), ('BYPASSRLS', a.rolbypassrls)) AS k (name, has)
WHERE a.rolname = ANY (%(roles)s) AND k.has ORDER BY 1, 2"""
# Of everybody but superusers, who are reported as such.
CLOSURE: LiteralString = """
SELECT m.rolname, g.rolname FROM pg_roles AS m CROSS JOIN pg_roles AS g
WHERE m.rolname = ANY (%(roles)s) AND NOT m.rolsuper AND m.oid <> g.oid AND pg_has_role(m.oid, g.oid, 'MEMBER')
ORDER BY 1, 2"""
MISSING: LiteralString = """
SELECT r FROM unnest(%(roles)s::text[]) AS r WHERE NOT EXISTS (SELECT FROM pg_roles AS p WHERE p.rolname = r)"""
OWNERS: LiteralString = """
SELECT c.relname, pg_get_userbyid(c.relowner) FROM pg_class AS c
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
UNION ALL SELECT p.proname, pg_get_userbyid(p.proowner) FROM pg_proc AS p WHERE p.pronamespace = 'fencepost'::regnamespace
UNION ALL SELECT 'schema fencepost', pg_get_userbyid(n.nspowner) FROM pg_namespace AS n WHERE n.nspname = 'fencepost'"""
STRANGERS: LiteralString = """
SELECT DISTINCT pg_get_userbyid(a.grantee), a.privilege_type, o.name
FROM (SELECT c.relname, c.relacl FROM pg_class AS c WHERE c.relnamespace = 'fencepost'::regnamespace
      UNION ALL SELECT p.proname, p.proacl FROM pg_proc AS p WHERE p.pronamespace = 'fencepost'::regnamespace
      UNION ALL SELECT 'schema fencepost', n.nspacl FROM pg_namespace AS n WHERE n.nspname = 'fencepost'
      UNION ALL SELECT c.relname, t.attacl FROM pg_attribute AS t JOIN pg_class AS c ON c.oid = t.attrelid
                WHERE c.relnamespace = 'fencepost'::regnamespace) AS o (name, acl)
CROSS JOIN LATERAL aclexplode(o.acl) AS a
WHERE a.grantee <> 0 AND pg_get_userbyid(a.grantee) <> ALL (%(roles)s) ORDER BY 1, 3, 2"""


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """One right of one role that is not as the matrix says; `has` tells on which side."""

    role: str
    privilege: str
    object: str
    has: bool

    def __str__(self) -> str:
        return f"{self.role} {'has' if self.has else 'lacks'} {self.privilege} on {self.object}"


def differences(conn: Connection[Any], install: str) -> list[Difference]:
    """Everything that is not exactly the matrix, sorted; empty when each role can do its row and nothing else."""
    owner = role(install, "owner")
    names = {role(install, name): name for name in ROLES}
    absent = {str(r[0]) for r in conn.execute(MISSING, {"roles": [owner, *names]})}
    found = [Difference(name, "existence", "the cluster", False) for name in absent]
    # The migrator is the owner's member and so may do all that the owner may.
    rows = {full: name for full, name in names.items() if name != "migrator" and full not in absent}
    found += _against(conn, {**rows, PUBLIC: PUBLIC})
    ours = [owner, *names]
    found += [Difference(str(r), str(k), "its role", True) for r, k in conn.execute(ATTRIBUTES, {"roles": ours})]
    allowed = (role(install, "migrator"), owner)
    members = [(str(m), str(g)) for m, g in conn.execute(CLOSURE, {"roles": ours})]
    found += [Difference(m, "membership", g, True) for m, g in members if (m, g) != allowed]
    if not absent & set(allowed) and allowed not in members:
        found.append(Difference(*allowed[:1], "membership", owner, False))
    found += [Difference(str(o), "ownership", str(n), True) for n, o in conn.execute(OWNERS) if str(o) != owner]
    # The grants of another owner to itself are told once, as its ownership.
    strange = conn.execute(
        STRANGERS, {"roles": [owner, *names, *{d.role for d in found if d.privilege == "ownership"}]}
    )
    found += [Difference(str(r), str(k), str(n), True) for r, k, n in strange]
    return sorted(set(found))


def beyond(conn: Connection[Any], install: str, row: str) -> list[Difference]:
    """What the login of this connection could do beyond one row of the matrix, itself or as any role it can become."""
    login = str(_one(conn, "SELECT session_user"))
    become = [str(g) for _, g in conn.execute(CLOSURE, {"roles": [login]})]
    attributes = conn.execute(ATTRIBUTES, {"roles": [login, *become]}).fetchall()
    found = [Difference(str(r), str(k), "its role", True) for r, k in attributes if k != "LOGIN"]
    found += [d for d in _against(conn, dict.fromkeys([login, *become], row)) if d.has]
    ours = {role(install, name) for name in ("owner", *ROLES)} - {role(install, row)}
    found += [Difference(login, "membership", name, True) for name in become if name in ours]
    return sorted(set(found))


def _against(conn: Connection[Any], rows: dict[str, str]) -> Iterator[Difference]:
    """Each of these roles against its row; the row of PUBLIC is empty."""
    roles = {"roles": list(rows)}
    for name, function, has in conn.execute(EXECUTES, roles):
        yield from _told(name, "EXECUTE", function, has, rows[name] in FUNCTIONS.get(function, ()))
    for name, table, has in conn.execute(READS, roles):
        yield from _told(name, "SELECT", table, has, rows[name] in TABLES.get(table, ()))
    kinds = [*KINDS, "MAINTAIN"] if conn.info.server_version >= MAINTAIN_SINCE else KINDS
    for name, table, privilege in conn.execute(CHANGES, {**roles, "kinds": kinds}):
        yield Difference(name, privilege, table, True)
    for name, privilege, has in conn.execute(SCHEMA, roles):
        yield from _told(name, privilege, "schema fencepost", has, privilege == "USAGE" and rows[name] in grants.ROLES)


def _told(name: str, privilege: str, thing: str, has: bool, should: bool) -> Iterable[Difference]:
    return () if has is should else (Difference(name, privilege, thing, has),)


def _one(conn: Connection[Any], statement: LiteralString) -> object:
    row = conn.execute(statement).fetchone()
    return None if row is None else row[0]
