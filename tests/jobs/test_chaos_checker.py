"""The checker of chaos and soak is able to fail: each kind of wrong answer, planted behind the protocol's back, is counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from bench.chaos import domain
from bench.chaos.checker import check
from bench.chaos.plan import KEYED, OPAQUE, PLAIN, QUIET
from bench.chaos.provider import Accepted, Ledger, read
from bench.chaos.systems import prepare

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import Job
from fencepost.jobs.fail import fail
from fencepost.jobs.fence import complete
from fencepost.jobs.publish import publish
from fencepost.jobs.submit import submit
from support.database import Database
from support.jobs import Conn, begun, claimed

OPERATIONS = {"paid": KEYED, "lost": OPAQUE, "gone": PLAIN, "bad": PLAIN, "quiet": QUIET}
LEDGER = (
    Accepted("keyed", "key-1", "paid/charge", "rcpt-1"),
    Accepted("opaque", "attempt-1", "lost/charge", "rcpt-2"),
)


def saved(job: Job, *receipts: str) -> dict[str, Any]:
    """The row that a publication of this claim writes."""
    return {
        "operation": job.operation,
        "class": job.job_class,
        "attempt": str(job.fence.attempt),
        "generation": job.fence.generation,
        "computed_by": str(job.fence.attempt),
        "receipts": list(receipts),
    }


@pytest.fixture
def scene(database18: Database) -> Iterator[Conn]:
    """One job of each end: published with its effect, stopped by an unknown one, cancelled, poison, done without a result."""
    with database18.connect(autocommit=True) as conn:
        prepare(conn)
        conn.execute("UPDATE fencepost.job_class SET lease = '1 min'")
        rows = [domain.row(0, name) | {"class": of, "tenant": "t"} for name, of in OPERATIONS.items()]
        domain.accept(conn, rows)
        for name, of in OPERATIONS.items():
            with conn.transaction():
                submit(conn, of, tenant="t", operation=name, args={"bad": False})
        jobs = {
            name: claimed(conn, name, job_class=of)
            for name, of in (("paid", KEYED), ("lost", OPAQUE), ("quiet", QUIET))
        }
        paid = jobs["paid"]
        attempt = begun(conn, paid.fence, "charge", kind="keyed", timeout=0.5)
        effects.record(conn, paid.fence, "charge", attempt, "success", receipt="rcpt-1")
        publish(conn, paid.fence, lambda tx: tx.execute(domain.SAVE, saved(paid, "rcpt-1")))
        attempt = begun(conn, jobs["lost"].fence, "charge", timeout=0.5)
        effects.record(conn, jobs["lost"].fence, "charge", attempt, "unknown", reason="timeout")
        complete(conn, jobs["quiet"].fence)
        cancel(conn, "t", "gone", PLAIN, actor="ann", reason="not wanted")
        fail(conn, claimed(conn, "bad", job_class=PLAIN).fence, "bad_input", detail="", final=True)
        yield conn
        conn.execute("DROP TABLE chaos_accepted, chaos_result")


@dataclass(frozen=True, slots=True)
class Plant:
    """A wrong answer: what is done to the tables, or to the ledger, and all that must be counted then."""

    expected: dict[str, int]
    statement: str = ""
    ledger: Callable[[tuple[Accepted, ...]], tuple[Accepted, ...]] = lambda entries: entries


INSERT = "INSERT INTO chaos_result (operation, class, attempt, generation, computed_by, receipts) "
PLANTS = {
    "a second result by the attempt before": Plant(
        {"stale_publications": 1, "not_applied_once": 1},
        INSERT + "SELECT operation, class, attempt, generation - 1, attempt, receipts FROM chaos_result",
    ),
    "a result by an attempt that was superseded since": Plant(
        {"stale_publications": 1},
        "INSERT INTO fencepost.attempt (tenant, attempt, operation, class, generation, owner, epoch, mode)"
        " SELECT tenant, gen_random_uuid(), operation, class, generation + 1, owner, epoch, mode FROM fencepost.attempt"
        " WHERE operation = 'paid'",
    ),
    "a result by an attempt that never was": Plant(
        {"stale_publications": 1}, "UPDATE chaos_result SET attempt = 'none', computed_by = 'none'"
    ),
    "a result of a cancelled job": Plant(
        {"stale_publications": 1}, INSERT + "VALUES ('gone', 'chaos.plain', 'none', 1, 'none', '{}')"
    ),
    "an effect accepted under two keys": Plant(
        {"duplicate_effects": 1}, ledger=lambda entries: (*entries, replace(entries[1], key="attempt-2"))
    ),
    "an effect accepted three times": Plant(
        {"duplicate_effects": 2}, ledger=lambda entries: (*entries, entries[0], entries[0])
    ),
    "a key accepted for two effects": Plant(
        {"duplicate_effects": 2, "lost_unknowns": 1},
        ledger=lambda entries: (*entries, replace(entries[0], subject="gone/charge")),
    ),
    "an acceptance without an effect": Plant(
        {"lost_unknowns": 1}, ledger=lambda entries: (*entries, Accepted("opaque", "k", "gone/charge", "rcpt-3"))
    ),
    "an acceptance taken for a failure": Plant(
        {"lost_unknowns": 1, "never_finishing": 1},
        "UPDATE fencepost.effect SET state = 'failed_before_dispatch', unknown_since = NULL WHERE operation = 'lost'",
    ),
    "an unknown effect that is nobody's": Plant(
        {"lost_unknowns": 1, "never_finishing": 1}, "UPDATE fencepost.effect SET assignee = '' WHERE operation = 'lost'"
    ),
    "an effect that stays pending": Plant(
        {"lost_unknowns": 1, "never_finishing": 1},
        "UPDATE fencepost.effect SET state = 'pending', unknown_since = NULL WHERE operation = 'lost'",
    ),
    "a receipt that the provider never gave": Plant(
        {"fabricated_outcomes": 2}, ledger=lambda entries: (replace(entries[0], receipt="rcpt-9"), entries[1])
    ),
    "a success that never happened": Plant(
        {"fabricated_outcomes": 2, "lost_unknowns": 0}, ledger=lambda entries: entries[1:]
    ),
    "done without a result": Plant({"not_applied_once": 1}, "DELETE FROM chaos_result"),
    "a job that was forgotten in the queue": Plant(
        {"never_finishing": 1}, "UPDATE fencepost.job SET exec = 'queued' WHERE operation = 'gone'"
    ),
    "poison without a reason": Plant(
        {"never_finishing": 1}, "UPDATE fencepost.job SET reason = NULL WHERE operation = 'bad'"
    ),
    "an operation without a job": Plant({"never_finishing": 1}, "DELETE FROM fencepost.job WHERE operation = 'gone'"),
}


def test_nothing_is_counted_where_nothing_is_wrong_and_every_wrong_answer_is(scene: Conn) -> None:
    assert check(scene, LEDGER).none(), check(scene, LEDGER)
    for name, plant in PLANTS.items():
        with scene.transaction(force_rollback=True):
            # Behind the back of triggers and foreign keys, as no client can.
            scene.execute("SET LOCAL session_replication_role = replica")
            if plant.statement:
                assert scene.execute(plant.statement.encode()).rowcount == 1, name
            found = check(scene, plant.ledger(LEDGER)).counts()
        assert {kind: count for kind, count in found.items() if count or kind in plant.expected} == plant.expected, name
    assert {kind for plant in PLANTS.values() for kind in plant.expected} == set(check(scene, LEDGER).counts())


def test_a_ledger_outlives_a_kill_and_knows_the_keys_that_it_accepted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with closing(Ledger(path)) as ledger:
        first = ledger.accept("keyed", "k", "op/charge")
    with path.open("ab") as file:
        file.write(b'{"kind": "keyed", "key": "cut')

    with closing(Ledger(path)) as again:
        assert again.accept("keyed", "k", "op/charge") == first == again.receipt("k")
        assert again.accept("opaque", "k", "op/charge") != first
    assert [entry.kind for entry in read(path)[0]] == ["keyed", "opaque"]
