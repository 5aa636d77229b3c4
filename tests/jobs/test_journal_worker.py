"""The journal as second witness: on the disk before the database hears of a begin, and never taken for nothing after a crash."""

import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.fence import Fence
from fencepost.jobs.journal import Journal, acknowledge
from fencepost.jobs.journal_begins import Begins, missing, present
from fencepost.jobs.journal_records import Begin
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.worker import Backoff, Worker
from fencepost.schemas import arming
from fencepost.schemas.errors import (
    BeginsMissing,
    EffectUnknown,
    InvalidInput,
    JournalInUse,
    JournalTorn,
    NotArmed,
    StaleFence,
)
from support.database import Database
from support.jobs import CLASS, Conn, age_effect, begun, claimed, column, effect, given, results, save, show
from support.journals import BROKEN, Faulty, read
from support.processes import Child, wait_for
from support.provider import Client, Provider
from support.workers import CHILD_PATH, QUICK, Running, becomes, running

SECRET = "hunter2"
NO_BACKOFF = Backoff(0.0, 0.0)


def worker(journal: Journal | Path, client: Client, **policy: Any) -> Worker:
    """Each job has one effect at the provider, and publishes its receipt."""
    made = Worker(journal=journal)
    options: dict[str, Any] = {"backoff": NO_BACKOFF} | QUICK | policy

    @made.job(CLASS, **options)
    def handler(ctx: Context, job: Job) -> None:
        done = ctx.effect("e1", client.call, {"operation": job.operation, "text": SECRET}, timeout=20.0)
        ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

    return made


def names(folder: Path) -> list[str]:
    """What the journal holds, bookkeeping aside."""
    return [r.name for r in read(folder)[1] if r.name not in ("opened", "closed")]


def begins(folder: Path) -> Begins:
    found = Begins()
    for record in read(folder)[1]:
        found.follow(record)
    return found


def key(operation: str) -> str:
    return effects.idempotency_key("t", operation, "e1")


def test_every_begin_is_in_the_journal_before_the_provider_is_called_and_no_request_ever(
    database18: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        seen: list[list[str]] = []
        provider.on_accept = lambda: seen.append(names(folder))
        for operation in ("a", "b"):
            given(conn, operation)
        with running(worker(folder, Client(provider.port)), database18, concurrency=1):
            becomes(conn, "done", "a")
            becomes(conn, "done", "b")
        assert seen == [["begin"], ["begin", "outcome", "begin"]]
        assert names(folder) == ["begin", "outcome"] * 2
        found = begins(folder)
        assert not found.unmatched and {b.operation for b in found.matched.values()} == {"a", "b"}
        (one,) = [b for b in found.matched.values() if b.operation == "a"]
        assert bytes.fromhex(one.request_digest) == bytes(effect(conn, "request_digest", "a"))
        assert (one.effect_attempt, one.attempt) == (effect(conn, "effect_attempt", "a"), effect(conn, "begun_by", "a"))
        assert missing(conn, found.matched.values()) == []
    assert SECRET.encode() not in b"".join(p.read_bytes() for p in folder.iterdir())
    assert b"receipt" not in b"".join(p.read_bytes() for p in folder.iterdir())


def test_a_begin_that_the_database_refuses_is_noted_as_not_begun(database18: Database, tmp_path: Path) -> None:
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        client = Client(provider.port)
        made = Worker(journal=folder)

        @made.job(CLASS, backoff=NO_BACKOFF, max_attempts=1, max_finishes=1, **QUICK)
        def handler(ctx: Context, job: Job) -> None:
            ctx.effect("e1", client.call, {"n": 1})
            ctx.effect("e1", client.call, {"n": 1})  # recorded: its receipt
            ctx.effect("e2", client.call, {"n": 2})  # a second key of a strict class

        given(conn)
        with running(made, database18):
            becomes(conn, "poison")
        assert names(folder)[:6] == ["begin", "outcome", "begin", "not_begun", "begin", "not_begun"]
        assert not begins(folder).unmatched and len(provider.accepted) == 1


def test_with_a_journal_that_cannot_be_written_no_effect_is_begun_nothing_is_claimed_and_it_goes_on_by_itself(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CHECKS 26."""
    disk = Faulty()
    journal = Journal(tmp_path / "j", disk=disk.disk)
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        given(conn, "before", max_attempts=3)
        made = worker(journal, Client(provider.port), max_attempts=3)
        with running(made, database18, concurrency=1):
            becomes(conn, "done", "before")
            wait_for(lambda: made.standing.readiness()[1]["state"] == "ready", 20, "the worker to be ready")
            disk.fail_sync = BROKEN
            given(conn, "during", max_attempts=3)
            wait_for(lambda: column(conn, "reason", "during") == "not_dispatched", 10, "the begin to be refused")
            attempts = column(conn, "attempts", "during")
            given(conn, "later", max_attempts=3)
            syncs = disk.syncs
            wait_for(lambda: disk.syncs >= syncs + 2, 20, "the journal to be opened anew in vain")
            assert (column(conn, "attempts", "during"), column(conn, "attempts", "later")) == (attempts, 0)
            assert made.standing.readiness()[1]["state"] == "journal" and not made.standing.readiness()[0]
            assert attempts == 1 and provider.accepted == [key("before")]
            assert conn.execute("SELECT count(*) FROM fencepost.effect WHERE operation <> 'before'").fetchone() == (0,)
            disk.fail_sync = 0
            becomes(conn, "done", "during")
            becomes(conn, "done", "later")
            wait_for(lambda: made.standing.readiness()[1]["state"] == "ready", 20, "the worker to be ready again")
        assert sorted(provider.accepted) == sorted(map(key, ("before", "during", "later")))
    assert "no effect is begun: the journal could not be synced" in caplog.text
    assert not begins(tmp_path / "j").unmatched and read(tmp_path / "j")[0].damage is None


DYING = """
import os, signal, sys
from pathlib import Path
from fencepost.jobs import effects
from fencepost.jobs.worker import Worker
from support.jobs import CLASS
from support.workers import QUICK

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

worker = Worker(journal=Path(sys.argv[2]))

@worker.job(CLASS, **QUICK)
def handler(ctx, job):
    ctx.effect("e1", die, {"operation": job.operation, "text": "hunter2"}, timeout=20.0)

if sys.argv[3] == "before":
    effects.begin = die
worker.run(sys.argv[1], concurrency=1)
"""


def dies(database: Database, folder: Path, when: str) -> None:
    """A worker that is killed before the begin reaches the database, or after its commit and before the dispatch."""
    arguments = [database.dsn, str(folder / "j"), when]
    with Child.script(DYING, folder=folder, arguments=arguments, **CHILD_PATH) as child:
        assert child.wait() == -signal.SIGKILL, child.text


def test_a_begin_whose_commit_is_not_known_is_unknown_and_stops_its_own_job_alone(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Crash here: [K1]."""
    caplog.set_level(logging.INFO)
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        given(conn)
        dies(database18, tmp_path, "before")
        assert names(folder) == ["begin"] and show(conn) == "running"
        assert conn.execute("SELECT count(*) FROM fencepost.effect").fetchone() == (0,)
        given(conn, "other")
        client = Client(provider.port)
        with running(worker(folder, client), database18):
            becomes(conn, "done", "other")
            assert (show(conn), column(conn, "reason")) == ("blocked", "effect_unknown")
            assert (effect(conn, "state"), effect(conn, "reason")) == ("unknown", "journalled_begin")
            assert "fencepost effects show --tenant t --operation op-1 --effect e1" in caplog.text
        age_effect(conn)
        reconcile(
            conn,
            *("t", "op-1", "e1"),
            version=effect(conn, "version"),
            verdict="not_applied",
            evidence_kind="receipt_lookup",
            evidence_ref="provider",
            actor="ann",
            reason="looked it up",
        )
        with running(worker(folder, client), database18):
            becomes(conn, "done")
        assert sorted(provider.accepted) == sorted([key("other"), key("op-1")])
        assert names(folder)[:2] == ["begin", "presented"] and names(folder).count("presented") == 1


def test_a_begin_that_the_database_has_is_left_to_its_own_deadline(database18: Database, tmp_path: Path) -> None:
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        given(conn)
        dies(database18, tmp_path, "after")
        assert (names(folder), effect(conn, "state")) == (["begin"], "pending")
        given(conn, "other")
        with running(worker(folder, Client(provider.port)), database18):
            becomes(conn, "done", "other")
            assert effect(conn, "state") == "pending" and show(conn) == "running"
        assert names(folder)[:2] == ["begin", "presented"] and provider.accepted == [key("other")]


def lose_effects(conn: Conn) -> None:
    """The database loses every begin, as after a failover that lost commits."""
    conn.execute("SET session_replication_role = replica")
    conn.execute("DELETE FROM fencepost.effect_event")
    conn.execute("DELETE FROM fencepost.effect")
    conn.execute("SET session_replication_role = origin")


def test_a_database_that_lost_a_begin_is_claimed_from_only_after_somebody_has_looked(
    database18: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        client = Client(provider.port)
        for operation in ("a", "b"):
            given(conn, operation)
        with running(worker(folder, client), database18):
            becomes(conn, "done", "a")
            becomes(conn, "done", "b")
        given(conn, "next")
        with running(worker(folder, client), database18):  # the control
            becomes(conn, "done", "next")
        lose_effects(conn)
        given(conn, "later")
        refused = Running(worker(folder, client), database18.dsn)
        with pytest.raises(BeginsMissing) as caught:
            refused.ended()
        assert str(caught.value).startswith("3 begins") and "fencepost journal acknowledge" in str(caught.value)
        assert show(conn, "later") == "queued" and column(conn, "attempts", "later") == 0

        one = next(b for b in begins(folder).matched.values() if b.operation == "a")
        assert [
            (b.operation, became)
            for b, became in acknowledge(folder, conn, actor="ann", reason="looked", attempts=[one.effect_attempt])
        ] == [("a", "unknown")]
        assert (show(conn, "a"), effect(conn, "state", "a")) == ("done", "unknown")
        with pytest.raises(BeginsMissing, match="2 begins"):
            Running(worker(folder, client), database18.dsn).ended()
        with pytest.raises(InvalidInput):
            acknowledge(folder, conn, actor="ann", reason="looked", attempts=[uuid4()])
        assert len(acknowledge(folder, conn, actor="ann", reason="looked")) == 2
        with running(worker(folder, client), database18):
            becomes(conn, "done", "later")
        assert [r.name for r in read(folder)[1]].count("acknowledged") == 3


def test_after_each_arming_the_journal_is_presented_again_before_anything_is_claimed(
    database18: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        given(conn, "a")
        made = Running(worker(folder, Client(provider.port)), database18.dsn)
        try:
            becomes(conn, "done", "a")
            conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
            wait_for(lambda: "nothing is claimed" in caplog.text, 10, "the worker to find it disarmed")
            lose_effects(conn)
            given(conn, "later")
            arming.ensure_armed(database18.dsn, database18.state)
            with pytest.raises(BeginsMissing, match="1 begins"):
                made.ended()
        finally:
            made.ask()
        assert column(conn, "attempts", "later") == 0


def test_a_begin_that_is_under_way_here_is_not_presented_and_one_that_ended_unread_is(
    database18: Database, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    with database18.connect(autocommit=True) as conn, journal.opened("worker-a"):
        given(conn)
        job = claimed(conn)

        def unread() -> None:
            journal.present(conn)
            assert show(conn) == "running"
            raise EffectUnknown("neither confirmed nor denied")

        with pytest.raises(EffectUnknown):
            journal.witness(frame(job.fence), unread)
        journal.present(conn)
        assert (show(conn), effect(conn, "state")) == ("blocked", "unknown")
        with pytest.raises(EffectUnknown):
            journal.witness(replace(frame(job.fence), operation="nobody's"), unread_elsewhere)
        for _ in range(2):
            with pytest.raises(BeginsMissing, match="operation nobody's"):
                journal.present(conn)


def unread_elsewhere() -> None:
    raise EffectUnknown("neither confirmed nor denied")


def test_a_journal_in_use_and_a_torn_one_are_refused_before_anything_is_claimed(
    database18: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "j"
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        client = Client(provider.port)
        given(conn, "a")
        with running(worker(folder, client), database18):
            becomes(conn, "done", "a")
            with pytest.raises(JournalInUse):
                Running(worker(folder, client), database18.dsn).ended()
        segment = folder / "00000001.journal"
        data = bytearray(segment.read_bytes())
        data[108] = 0x5A  # as if it had not been closed
        segment.write_bytes(data[:-5])
        given(conn, "b")
        with pytest.raises(JournalTorn, match="fencepost journal repair"):
            Running(worker(folder, client), database18.dsn).ended()
        assert show(conn, "b") == "queued"


def frame(f: Fence, *, attempt: UUID | None = None, effect_key: str = "e1") -> Begin:
    """A begin of this claim as a journal would hold it; the database has not heard of it unless it did."""
    digest = effects.request_digest({"key": effect_key})
    return Begin(
        tenant=f.tenant,
        operation=f.operation,
        job_class=f.job_class,
        effect_key=effect_key,
        effect_attempt=attempt or uuid4(),
        kind="opaque",
        generation=f.generation,
        attempt=f.attempt,
        epoch=f.epoch,
        request_digest=digest.hex(),
    )


def test_a_presented_begin_takes_authority_away_and_keeps_every_receipt(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "running")
        job = claimed(conn, "running")
        known = frame(job.fence, attempt=begun(conn, job.fence))
        assert present(conn, known) == "known" and missing(conn, [known]) == []  # the control
        assert (show(conn, "running"), effect(conn, "state", "running")) == ("running", "pending")
        assert present(conn, frame(job.fence)) == "pending"
        effects.record(conn, job.fence, "e1", known.effect_attempt, "success", receipt="r-1")
        late = frame(job.fence)
        assert missing(conn, [late, known]) == [late]
        assert present(conn, late) == "superseded" and present(conn, late) == "known"
        assert missing(conn, [late]) == []
        assert (effect(conn, "state", "running"), effect(conn, "receipt", "running")) == ("success", "r-1")
        publish(conn, job.fence, lambda tx: save(tx, "running"), lease=5.0)
        assert show(conn, "running") == "done" and present(conn, frame(job.fence)) == "superseded"

        # No effect at all: the attempt that runs loses the job.
        given(conn, "none")
        job = claimed(conn, "none")
        assert present(conn, frame(job.fence)) == "unknown"
        assert (show(conn, "none"), effect(conn, "state", "none")) == ("blocked", "unknown")
        with pytest.raises(StaleFence):
            publish(conn, job.fence, lambda tx: save(tx, "none"), lease=5.0)
        assert present(conn, frame(job.fence)) == "superseded" and column(conn, "open_effects", "none") == 1

        # "Failed before dispatch" was said of another begin; the job is queued, cancelled, or does not exist.
        for operation, became in (("queued", "blocked"), ("cancelled", "cancelled")):
            given(conn, operation)
            job = claimed(conn, operation)
            attempt = begun(conn, job.fence)
            effects.record(conn, job.fence, "e1", attempt, "failed_before_dispatch")
            conn.execute("UPDATE fencepost.job SET lease_until = clock_timestamp() WHERE operation = %s", (operation,))
            if operation == "cancelled":
                cancel(conn, "t", operation, CLASS, actor="ann", reason="no longer wanted")
            else:
                conn.execute(
                    "UPDATE fencepost.job SET exec = 'queued', attempt = NULL, owner = NULL, lease_until = NULL"
                    " WHERE operation = %s",
                    (operation,),
                )
            again = frame(job.fence)
            assert present(conn, again) == "unknown" and show(conn, operation) == became
            assert (effect(conn, "effect_attempt", operation), column(conn, "open_effects", operation)) == (
                again.effect_attempt,
                1,
            )
            assert effects.record(conn, job.fence, "e1", again.effect_attempt, "success", receipt="r") == "success"
            assert show(conn, operation) == ("queued" if became == "blocked" else became)
        lost = frame(job.fence)
        assert present(conn, replace(lost, operation="nobody's")) == "no_job"
        assert results(conn, "none") == []

        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
        with pytest.raises(NotArmed):
            present(conn, lost)


def test_not_applied_is_taken_back_by_a_begin_that_nobody_knew_of(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        effects.record(conn, job.fence, "e1", attempt, "unknown")
        age_effect(conn)
        reconcile(
            conn,
            *("t", "op-1", "e1"),
            version=effect(conn, "version"),
            verdict="not_applied",
            evidence_kind="receipt_lookup",
            evidence_ref="provider",
            actor="ann",
            reason="looked it up",
        )
        assert (show(conn), effect(conn, "state")) == ("queued", "resolved_not_applied")  # the control
        assert present(conn, frame(job.fence)) == "unknown"
        assert (show(conn), effect(conn, "state"), effect(conn, "decision_id")) == ("blocked", "unknown", None)
