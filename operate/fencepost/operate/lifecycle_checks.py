"""Checks of the lifecycle of jobs: one author writes them, and every loop that can make one runnable goes through it.

The author is the owner of the table: jobs are written by its functions and nobody else may. What writes jobs is asked of the
catalog, whatever schema it is in, and compared with the loops that are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
from psycopg import Connection

from fencepost.operate import printing
from fencepost.operate.findings import Finding, fail, ok, warn
from fencepost.operate.refusals import line_of

__all__ = ["LOOPS", "author", "loops", "owners", "writers"]

NAMES_MAX = 5

# Which functions write jobs, or point to them in the agenda, on behalf of what.
LOOPS: dict[str, tuple[str, ...]] = {
    "acceptance, periodic schedules and broker redelivery": ("submit", "submit_many"),
    "start-up recovery and claims": ("claim", "present_begin"),
    "reaper of expired leases": ("_reap", "_leave"),
    "retries": ("fail", "release"),
    "due times and signals": ("wait", "signal", "_wake", "_wait_pointers", "_agenda"),
    "effects begun and settled": ("begin_effect", "_settle", "_dispute", "_doubt_effect"),
    "operators' retries and cancels": ("requeue", "cancel"),
    "changes of authority, release and recovery": (
        *("_hold_running", "release_held", "_doubt_jobs", "_rebuild_agenda"),
    ),
    "renewal and completion": ("renew", "complete", "complete_many"),
    "transfer to another implementation and back": ("take_over", "give_back"),
    "upkeep of the agenda": ("register_class", "_forget_pointers"),
    "archive of finished jobs": ("archive_jobs",),
}

# In the text of a function, or in its parsed body where it has no text.
WRITERS: LiteralString = r"""
SELECT n.nspname::text, p.proname::text, p.proowner = c.relowner
FROM pg_class AS c, pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE c.oid = 'fencepost.job'::regclass AND p.prokind IN ('f', 'p')
  AND coalesce(pg_get_function_sqlbody(p.oid), p.prosrc)
      ~* '\m(insert\s+into|update(\s+only)?|delete\s+from(\s+only)?|merge\s+into(\s+only)?|truncate(\s+table)?(\s+only)?)\s+"?fencepost"?\s*\.\s*"?(job|agenda)"?\M'
ORDER BY 1, 2"""
# The owner's members are the owner; what PostgreSQL brings along matters for its members only.
RIGHTS: LiteralString = """
SELECT DISTINCT r.rolname::text
FROM (SELECT 'public' AS rolname, 0::oid AS oid
      UNION ALL SELECT r.rolname::text, r.oid FROM pg_roles AS r WHERE NOT r.rolsuper AND r.oid >= 16384) AS r
CROSS JOIN (SELECT c.oid, c.relowner FROM pg_class AS c
            WHERE c.oid IN ('fencepost.job'::regclass, 'fencepost.agenda'::regclass, 'fencepost.lifecycle'::regclass)) AS t
WHERE (r.oid = 0 OR NOT pg_has_role(r.oid, t.relowner, 'MEMBER'))
  AND (has_any_column_privilege(r.rolname, t.oid, 'INSERT') OR has_any_column_privilege(r.rolname, t.oid, 'UPDATE')
       OR has_table_privilege(r.rolname, t.oid, 'DELETE') OR has_table_privilege(r.rolname, t.oid, 'TRUNCATE')
       OR has_table_privilege(r.rolname, t.oid, 'TRIGGER'))
ORDER BY 1"""
TRIGGERS: LiteralString = """
SELECT coalesce(g.tgname::text, u.name), g.tgname IS NOT NULL, u.name IS NOT NULL
FROM (SELECT g.tgname, g.tgenabled FROM pg_trigger AS g
      WHERE g.tgrelid IN ('fencepost.job'::regclass, 'fencepost.agenda'::regclass) AND NOT g.tgisinternal AND g.tgenabled <> 'D') AS g
FULL JOIN unnest(%(ours)s::text[]) AS u (name) ON u.name = g.tgname
WHERE g.tgname IS NULL OR u.name IS NULL
UNION ALL
SELECT w.rulename::text, true, false FROM pg_rewrite AS w
WHERE w.ev_class IN ('fencepost.job'::regclass, 'fencepost.agenda'::regclass)
ORDER BY 1"""
OURS = ["agenda_insert", "agenda_update", "generation_guard", "note_job"]
OWNERS: LiteralString = """
SELECT l.class, l.implementation,
       EXISTS (SELECT FROM fencepost.agenda AS a
               JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
               WHERE a.class = l.class AND a.priority = 2147483647 AND j.exec = 'running') AS runs,
       (SELECT extract(epoch FROM clock_timestamp() - min(a.due))::float FROM fencepost.agenda AS a
        WHERE a.class = l.class AND a.priority < 2147483646 AND a.due < clock_timestamp()) AS waits
FROM fencepost.lifecycle AS l ORDER BY l.class"""


def writers(conn: Connection[Any]) -> list[tuple[str, str, bool]]:
    """Schema and name of every function that writes jobs, and whether the owner of the table owns it."""
    return [(str(s), str(n), bool(o)) for s, n, o in conn.execute(WRITERS)]


def loops(conn: Connection[Any]) -> Iterator[Finding]:
    """One line for each loop that can make a job runnable; it goes through functions of the one author, or the line says not."""
    try:
        found = writers(conn)
    except psycopg.Error as error:
        yield fail("loops", line_of(error))
        return
    ours = {name: owned for schema, name, owned in found if schema == "fencepost"}
    for loop, functions in LOOPS.items():
        missing = [name for name in functions if not ours.get(name, False)]
        if missing:
            yield fail(
                "loop",
                f"{loop}: {', '.join(missing)} is not there as the owner of the jobs made it; run `fencepost migrate`,"
                " then `fencepost grants apply`",
            )
        else:
            yield ok("loop", f"{loop}: through {', '.join(functions)}")


def author(conn: Connection[Any]) -> Finding:
    """Nobody else writes jobs: no other function, no trigger or rule, and no role may but the owner."""
    known = {name for functions in LOOPS.values() for name in functions}
    strange = [f"{s}.{n}" for s, n, _ in writers(conn) if s != "fencepost" or n not in known]
    if strange:
        return fail(
            "author",
            f"a second author writes jobs: {_names(strange)}; drop it, and let it call fencepost.submit, cancel or requeue",
        )
    may = [str(name) for (name,) in conn.execute(RIGHTS)]
    if may:
        return fail(
            "author",
            f"{_names(may)} may write jobs past their functions; revoke INSERT, UPDATE, DELETE, TRUNCATE and TRIGGER on"
            " fencepost.job, agenda and lifecycle, and membership in pg_write_all_data",
        )
    rows = conn.execute(TRIGGERS, {"ours": OURS}).fetchall()
    if added := [str(name) for name, there, _ in rows if there]:
        return fail("author", f"{_names(added)} changes jobs as they are written; drop that trigger or rule")
    if gone := [str(name) for name, _, ours in rows if ours]:
        return fail(
            "author",
            f"the trigger {_names(gone)} of the jobs is missing or disabled; enable it, or run `fencepost migrate`",
        )
    return ok("author", "jobs are written by the functions of these loops and by nothing else")


def owners(conn: Connection[Any]) -> Finding:
    """Whose the classes are; one that is another's does not run here."""
    rows = conn.execute(OWNERS).fetchall()
    both = [f"{name} ({owner})" for name, owner, runs, _ in rows if runs]
    if both:
        return fail(
            "owner",
            f"two owners: jobs run here of {_names(both)}; stop those workers, and see `fencepost jobs owner show`",
        )
    waiting = [
        f"{name} ({owner}) for {printing.age(seconds)}" for name, owner, _, seconds in rows if seconds is not None
    ]
    if waiting:
        return warn(
            "owner", f"nobody here claims what waits for its owner: {_names(waiting)}; see `fencepost jobs owner show`"
        )
    if rows:
        return ok(
            "owner", f"fencepost owns every class but {_names([f'{name} ({owner})' for name, owner, *_ in rows])}"
        )
    return ok("owner", "fencepost owns every class")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more
