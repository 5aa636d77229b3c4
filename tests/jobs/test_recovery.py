"""Recovery: what comes back, what stays held, what the runners' journals know, and what no restore lifts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from fencepost.jobs import effects
from fencepost.jobs.authority import By, lift, release, restrict, thaw
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import claim
from fencepost.jobs.fence import Fence
from fencepost.jobs.journal_records import Begin, Outcome
from fencepost.jobs.journal_writer import Writer
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.recovery import holds
from fencepost.jobs.submit import submit
from fencepost.schemas import arming, migrate
from fencepost.schemas.errors import EffectOpen, NotArmed, Restricted, WitnessMismatch
from fencepost.schemas.witness import FileWitness
from support.database import Databases
from support.jobs import CLASS, Conn, begun, claimed, column, effect, given, results, save, show
from support.journals import writer
from support.restores import Restores, recovered, restores

BY = By("ann", "why")


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


@pytest.fixture
def both(databases: Databases) -> Iterator[Restores]:
    """On each supported PostgreSQL."""
    with restores(databases) as found:
        yield found


def frame(f: Fence, key: str = "e1") -> Begin:
    """A begin of this claim as its runner's journal holds it."""
    return Begin(
        tenant=f.tenant,
        operation=f.operation,
        job_class=f.job_class,
        effect_key=key,
        effect_attempt=uuid4(),
        kind="opaque",
        generation=f.generation,
        attempt=f.attempt,
        epoch=f.epoch,
        request_digest=effects.request_digest({"key": key}).hex(),
    )


def journalled(conn: Conn, journal: Writer, f: Fence, key: str = "e1") -> Begin:
    """Begun as a worker does it: first in its journal, then in the database."""
    begin = frame(f, key)
    journal.append(begin)
    effects.begin(
        *(conn, f, key),
        kind="opaque",
        effect_attempt=begin.effect_attempt,
        digest=bytes.fromhex(begin.request_digest),
        timeout=5.0,
    )
    return begin


def write(conn: Conn, f: Fence, by: str = "a") -> None:
    publish(conn, f, lambda tx: save(tx, f.operation, by))


def test_every_job_comes_back_as_what_may_be_known_of_it(both: Restores) -> None:
    with both.live.connect(autocommit=True) as conn:
        for operation in ("done", "running", "pending", "applied", "cancelled"):
            given(conn, operation)
            if operation == "running":
                claimed(conn, operation)
                continue
            mine = claimed(conn, operation).fence
            if operation == "done":
                write(conn, mine)
                continue
            attempt = begun(conn, mine)
            if operation == "applied":
                effects.record(conn, mine, "e1", attempt, "success", receipt="r-1")
            if operation == "cancelled":
                cancel(conn, "t", operation, CLASS, actor="ann", reason="why")
        given(conn, "queued")
    old = both.restored(both.backup())

    with old.connect(autocommit=True) as conn:
        numbers = conn.execute("SELECT last_value, is_called FROM fencepost.outbox_seq").fetchone()
    would = recovered(old, dry_run=True)
    with old.connect(autocommit=True) as conn:
        assert not arming.read_tip(conn).armed and show(conn, "queued") == "queued"
        assert conn.execute("SELECT last_value, is_called FROM fencepost.outbox_seq").fetchone() == numbers
    done = recovered(old)

    assert (would.jobs, would.unknown, [replace(h, oldest=None) for h in would.holds]) == (
        done.jobs,
        done.unknown,
        [replace(h, oldest=None) for h in done.holds],
    )
    assert (done.jobs, done.unknown) == (5, 2)
    with old.connect(autocommit=True) as conn:
        assert {
            operation: show(conn, operation)
            for operation in ("done", "running", "pending", "applied", "cancelled", "queued")
        } == {
            "done": "done",
            "running": "held",
            "pending": "blocked",
            "applied": "held",
            "cancelled": "cancelled",
            "queued": "held",
        }
        assert not column(conn, "suspect", "done") and column(conn, "suspect", "queued")
        assert effect(conn, "effect_attempt", "applied") is None and effect(conn, "receipt", "applied") == "r-1"
        found = {(h.what, h.owner): h.count for h in done.holds}
        assert found == {
            ("frozen", "authority admin"): 1,
            ("can resume", "authority admin"): 1,  # the one with the receipt
            ("effects suspect", "operator"): 2,
            ("effect unknown", "operator"): 2,
        }
        assert claim(conn, "b", [CLASS], 10) == []
        assert conn.execute("SELECT count(*) FROM fencepost.agenda").fetchone() == (0,)
        thaw(conn, BY)
        assert release(conn, BY).released == 3
        jobs = {str(job.operation): job for job in claim(conn, "b", [CLASS], 10)}
        assert sorted(jobs) == ["applied", "queued", "running"]
        write(conn, jobs["applied"].fence, "b")
        with pytest.raises(EffectOpen):
            begun(conn, jobs["queued"].fence)
        assert results(conn, "applied") == ["b"]
        assert conn.execute("SELECT fencepost.verify_authority()").fetchone() == (None,)


def test_begins_of_the_runners_journals_are_unknown_and_those_of_lost_jobs_are_noted(
    made: Restores, tmp_path: Path
) -> None:
    journal = writer(tmp_path / "journal")
    with made.live.connect(autocommit=True) as conn:
        given(conn, "kept", policy="resumable")
        given(conn, "known", policy="resumable")
        journalled(conn, journal, claimed_one(conn, "known"))
    backup = made.backup()
    with made.live.connect(autocommit=True) as conn:
        journalled(conn, journal, claimed_one(conn, "kept"))
        given(conn, "lost")
        lost = journalled(conn, journal, claimed(conn, "lost").fence)
        # Its outcome was recorded, in what was lost too.
        journal.note(Outcome(effect_attempt=lost.effect_attempt, outcome="success", reason=None))
    journal.close()
    old = made.restored(backup)
    would = recovered(old, journals=[tmp_path / "journal"], dry_run=True)
    with old.connect(autocommit=True) as conn:
        assert not arming.read_tip(conn).armed
        assert conn.execute("SELECT count(*) FROM fencepost.lost_begin").fetchone() == (0,)

    done = recovered(old, journals=[tmp_path / "journal"])

    assert replace(would, holds=()) == replace(done, holds=())
    assert [replace(h, oldest=None) for h in would.holds] == [replace(h, oldest=None) for h in done.holds]
    assert (done.presented, [b.operation for b in done.lost], done.damaged) == (3, ["lost"], ())
    again = recovered(old, journals=[tmp_path / "journal"])
    assert again.already and (again.presented, again.lost, again.holds) == (3, done.lost, done.holds)
    with old.connect(autocommit=True) as conn:
        assert [show(conn, o) for o in ("kept", "known")] == ["blocked", "blocked"]
        assert effect(conn, "reason", "kept") == "journalled_begin"
        assert ("begun, and its job is lost", 1) in [(h.what, h.count) for h in holds(conn)]
        # Submitted again it is suspect, although nothing says when it was accepted.
        given(conn, "lost")
        given(conn, "new")
        thaw(conn, BY)
        with pytest.raises(EffectOpen):
            begun(conn, claimed_one(conn, "lost"))
        begun(conn, claimed_one(conn, "new"))  # the control
        assert what_is_held(conn) == {"begun, and its job is lost", "effect unknown"}
        reconcile(
            *(conn, "t", "lost", "e1"),
            version=0,
            verdict="applied",
            evidence_kind="receipt_lookup",
            evidence_ref="provider/1",
            receipt="r-1",
            actor="ann",
            reason="asked",
        )
        assert what_is_held(conn) == {"effect unknown"}


def what_is_held(conn: Conn) -> set[str]:
    return {h.what for h in holds(conn)} - {"effects suspect", "can resume"}


def claimed_one(conn: Conn, operation: str) -> Fence:
    """The claim of one job; others are given back."""
    found = claim(conn, "worker-a", [CLASS], 100)
    for job in found:
        if job.operation != operation:
            conn.execute(
                "SELECT fencepost.release(%s, %s, %s, %s, %s, %s, %s)",
                (
                    job.tenant,
                    job.operation,
                    CLASS,
                    job.fence.generation,
                    job.fence.attempt,
                    "worker-a",
                    job.fence.epoch,
                ),
            )
    (mine,) = [job.fence for job in found if job.operation == operation]
    return mine


def test_a_journal_that_was_torn_is_read_as_far_as_it_verifies_and_named(made: Restores, tmp_path: Path) -> None:
    journal = writer(tmp_path / "journal")
    with made.live.connect(autocommit=True) as conn:
        given(conn)
        journalled(conn, journal, claimed(conn).fence)
    journal.close()
    (segment,) = (tmp_path / "journal").glob("*.journal")
    with open(segment, "ab") as file:
        file.write(b"torn")
    old = made.restored(made.backup())

    done = recovered(old, journals=[tmp_path / "journal"])

    assert done.presented == 1 and done.damaged == (str(tmp_path / "journal"),)


def test_no_restore_lifts_a_restriction(made: Restores) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
    backup = made.backup()
    restrict(made.live.dsn, made.live.state, BY, "tenant", "t")
    old = made.restored(backup)
    with old.connect(autocommit=True) as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.restriction").fetchone() == (0,)

        recovered(old)

        assert ("suspended", "t") in [(h.what, h.tenant) for h in holds(conn)]
        with pytest.raises(Restricted):
            release(conn, BY, tenant="t")
        assert lift(old.dsn, old.state, BY, "tenant", "t")
        release(conn, BY, tenant="t")
        assert claim(conn, "b", [CLASS], 1)


def test_a_recovery_waits_for_acceptance_under_way_only_for_a_while(made: Restores) -> None:
    old = made.restored(made.backup())
    with old.connect() as writing:
        given_in(writing)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            recovered(old)
        writing.rollback()
    with old.connect(autocommit=True) as conn, pytest.raises(NotArmed):
        claim(conn, "a", [], 1)
    recovered(old)  # the control


def given_in(conn: Conn) -> None:
    """A job that was submitted and not committed."""
    submit(conn, CLASS, tenant="t", operation="op-1", args={"n": 1})


def test_another_installations_witness_recovers_nothing(made: Restores, databases18: Databases) -> None:
    other = databases18.empty()
    try:
        migrate.apply(other.dsn, state=other.state)
        old = made.restored(made.backup())
        with pytest.raises(WitnessMismatch):
            recovered(type(old)(old.dsn, other.state))
    finally:
        databases18.drop(other)
    told = FileWitness(old.state).read()
    assert recovered(old).epoch == told.epoch + 1  # the control
