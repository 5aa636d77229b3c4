"""Guards that are no functions: constraints and triggers, read from the catalog of a migrated database."""

from __future__ import annotations

import re
from typing import Any

from psycopg import Connection

from mutation.predicates import Mutant, conditions

TABLES = (
    "job", "job_class", "attempt", "staged", "publication", "effect", "effect_event", "decision", "lookup", "manifest", "object",
)  # fmt: skip
CONSTRAINTS = """
SELECT c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid)
FROM pg_constraint AS c WHERE c.contype IN ('c', 'f') AND c.conparentid = 0 AND c.connamespace = 'fencepost'::regnamespace
  AND c.conrelid IN (SELECT format('fencepost.%%I', n)::regclass FROM unnest(%(tables)s::text[]) AS n) ORDER BY 1, 2"""
TRIGGERS = """
SELECT t.tgrelid::regclass::text, t.tgname, pg_get_triggerdef(t.oid)
FROM pg_trigger AS t WHERE NOT t.tgisinternal AND t.tgparentid = 0
  AND t.tgrelid IN (SELECT format('fencepost.%%I', n)::regclass FROM unnest(%(tables)s::text[]) AS n) ORDER BY 1, 2"""
EVENTS = re.compile(r"(?<=BEFORE |.AFTER )(\w+(?: OR \w+)+)(?= ON)")
WHEN = re.compile(r" WHEN \((.*)\) EXECUTE ", re.DOTALL)


def mutants(conn: Connection[Any]) -> list[Mutant]:
    """Each constraint dropped; each trigger dropped, and without each of its events and conditions."""
    found: list[Mutant] = []
    tables = {"tables": list(TABLES)}
    for table, name, definition in conn.execute(CONSTRAINTS, tables):
        drop = f"ALTER TABLE {table} DROP CONSTRAINT {name}"
        # What broke it in a test is emptied before the next one.
        add = f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition} NOT VALID"
        found.append(_mutant(table, f"{name} {definition} dropped", drop, add))
    for table, name, definition in conn.execute(TRIGGERS, tables):
        drop = f"DROP TRIGGER IF EXISTS {name} ON {table}"
        undo = f"{drop}; {definition}"
        found.append(_mutant(table, f"trigger {name} dropped", drop, undo))
        for what, changed in _changed(definition):
            found.append(_mutant(table, f"trigger {name} {what}", f"{drop}; {changed}", undo))
    return found


def _changed(definition: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    events = EVENTS.search(definition)
    if events is not None:
        several = events[1].split(" OR ")
        for event in several:
            rest = " OR ".join(other for other in several if other != event)
            found.append((f"without {event}", definition.replace(events[1], rest, 1)))
    when = WHEN.search(definition)
    if when is not None:
        found.append(("whatever WHEN says", definition.replace(f"WHEN ({when[1]}) ", "", 1)))
        found += [(what, definition.replace(when[1], changed, 1)) for what, changed in conditions(when[1])]
    return found


def _mutant(table: str, what: str, apply: str, undo: str) -> Mutant:
    name = table.removeprefix("fencepost.")
    return Mutant(f"{name}: {' '.join(what.split())}", "tables", name, 0, apply, undo)
