"""The offline checker: counts wrong answers from the domain's tables and the provider's ledger.

What the workers say of themselves is not asked. The protocol's tables are read for what they claim (which attempt was the
newest, what an effect is held for, where a job stands), and every claim is held against rows and lines that they did not
write.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, LiteralString

from bench.chaos.plan import PUBLISHING, subject
from bench.chaos.provider import Accepted
from psycopg import Connection
from psycopg.rows import dict_row

SHOWN = 5
NOT_APPLIED = frozenset({"failed_before_dispatch", "resolved_not_applied"})
APPLIED = frozenset({"success", "resolved_applied"})

JOBS: LiteralString = """
SELECT a.operation, a.class, j.exec, j.reason, j.done_attempt::text AS done_attempt, j.open_effects, k.assignee,
       (SELECT max(t.generation) FROM fencepost.attempt AS t
        WHERE t.tenant = a.tenant AND t.operation = a.operation AND t.class = a.class) AS newest
FROM chaos_accepted AS a
LEFT JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
LEFT JOIN fencepost.job_class AS k ON k.class = a.class"""
RESULTS: LiteralString = """
SELECT r.operation, r.attempt, r.generation, r.receipts, EXISTS (
    SELECT FROM fencepost.attempt AS t
    WHERE t.attempt::text = r.attempt AND t.operation = r.operation AND t.class = r.class AND t.generation = r.generation) AS known
FROM chaos_result AS r ORDER BY r.at"""
EFFECTS: LiteralString = """
SELECT e.operation, e.effect_key, e.state, e.receipt, e.assignee, e.unknown_since IS NOT NULL AS since, e.contradicted
FROM fencepost.effect AS e"""


@dataclass(slots=True)
class Wrong:
    """What must not be; each member lists the operations or effects concerned."""

    stale_publications: list[str] = field(default_factory=list[str])
    """A domain row of an attempt that was superseded, cancelled or never made."""
    duplicate_effects: list[str] = field(default_factory=list[str])
    """The provider accepted the same effect, or the same request key, once more."""
    lost_unknowns: list[str] = field(default_factory=list[str])
    """Accepted by the provider and not applied here; or open, and nobody's."""
    fabricated_outcomes: list[str] = field(default_factory=list[str])
    """Applied here, or published, under a receipt that the provider never gave for it."""
    not_applied_once: list[str] = field(default_factory=list[str])
    """Accepted operations that are done, and have no result or more than one."""
    never_finishing: list[str] = field(default_factory=list[str])
    """Neither done nor cancelled, and not visibly stopped with a reason and an owner either."""

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {each.name: len(getattr(self, each.name)) for each in fields(self)}

    def none(self) -> bool:
        """Whether nothing is wrong."""
        return not any(self.counts().values())

    def lines(self) -> list[str]:
        """For people: each count, with the first few of what it counts."""
        made: list[str] = []
        for name, count in self.counts().items():
            shown = ", ".join(getattr(self, name)[:SHOWN])
            made.append(f"  {name.replace('_', ' '):22s} {count}{f'   {shown}' if count else ''}")
        return made


Row = Mapping[str, Any]


def check(conn: Connection[Any], ledger: Sequence[Accepted]) -> Wrong:
    """Everything that is wrong once all has come to rest; reads one snapshot of the database."""
    wrong = Wrong()
    jobs = {row["operation"]: row for row in _rows(conn, JOBS)}
    effects = _rows(conn, EFFECTS)
    results: dict[str, list[Row]] = defaultdict(list)
    for result in _rows(conn, RESULTS):
        results[result["operation"]].append(result)
    receipts: dict[str, set[str]] = defaultdict(set)
    given: dict[str, set[str]] = defaultdict(set)
    for entry in ledger:
        receipts[entry.subject].add(entry.receipt)
        given[entry.subject.rpartition("/")[0]].add(entry.receipt)
    _publications(wrong, jobs, results, given)
    _acceptances(wrong, ledger)
    _effects(wrong, effects, receipts)
    _ends(wrong, jobs, effects)
    return wrong


def _publications(
    wrong: Wrong, jobs: Mapping[str, Row], results: Mapping[str, list[Row]], given: Mapping[str, set[str]]
) -> None:
    for operation, rows in results.items():
        job = jobs.get(operation)
        for row in rows:
            current = (
                job is not None
                and job["exec"] == "done"
                and row["known"]
                and row["attempt"] == job["done_attempt"]
                and row["generation"] == job["newest"]
            )
            if not current:
                wrong.stale_publications.append(f"{operation} by generation {row['generation']}")
            if not set(row["receipts"]) <= given.get(operation, set()):
                wrong.fabricated_outcomes.append(operation)
    for operation, job in jobs.items():
        if job["exec"] == "done" and job["class"] in PUBLISHING and len(results.get(operation, ())) != 1:
            wrong.not_applied_once.append(f"{operation}: {len(results.get(operation, ()))} results")


def _acceptances(wrong: Wrong, ledger: Sequence[Accepted]) -> None:
    subjects = Counter(entry.subject for entry in ledger)
    keys = Counter((entry.kind, entry.key) for entry in ledger)
    again = {of: count for of, count in subjects.items() if count > 1}
    wrong.duplicate_effects += [f"{of} x{count}" for of, count in again.items() for _ in range(count - 1)]
    others = {key for key, count in keys.items() if count > 1}
    wrong.duplicate_effects += [
        f"key {entry.key}" for entry in ledger if (entry.kind, entry.key) in others and entry.subject not in again
    ]


def _effects(wrong: Wrong, effects: Sequence[Row], receipts: Mapping[str, set[str]]) -> None:
    held: dict[str, Row] = {subject(row["operation"], row["effect_key"]): row for row in effects}
    for of in receipts:
        if (row := held.get(of)) is None or row["state"] in NOT_APPLIED:
            wrong.lost_unknowns.append(f"{of}: {'no effect' if row is None else row['state']}, and accepted")
    for of, row in held.items():
        if row["state"] in APPLIED and row["receipt"] not in receipts.get(of, ()):
            wrong.fabricated_outcomes.append(f"{of}: {row['state']}")
        if row["state"] == "pending" or row["state"] == "unknown" and not (row["assignee"] and row["since"]):
            wrong.lost_unknowns.append(f"{of}: {row['state']}, and nobody's")


def _ends(wrong: Wrong, jobs: Mapping[str, Row], effects: Sequence[Row]) -> None:
    owned = {row["operation"] for row in effects if row["state"] == "unknown" and row["assignee"]}
    for operation, job in jobs.items():
        match job["exec"]:
            case "done" | "cancelled":
                continue
            case "blocked" if job["reason"] and operation in owned:
                continue
            case "poison" if job["reason"] and job["assignee"] and job["open_effects"] == 0:
                continue
            case state:
                wrong.never_finishing.append(f"{operation}: {state or 'no job'} ({job['reason']})")


def _rows(conn: Connection[Any], query: LiteralString) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return list(cursor.execute(query).fetchall())
