"""One owner of the lifecycle of a class: a second one is refused, and a job is in one place whatever is taken over or given back."""

from __future__ import annotations

import psycopg
import pytest

from fencepost.jobs.authority import By
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import claim
from fencepost.jobs.effects import record
from fencepost.jobs.fail import fail, release
from fencepost.jobs.lifecycle import FENCEPOST, Taken, give_back, hand_over, own, take_over
from fencepost.jobs.publish import publish
from fencepost.jobs.recovery import holds
from fencepost.jobs.submit import submit
from fencepost.schemas.errors import (
    EffectOpen,
    EvidenceMissing,
    InvalidInput,
    SecondOwner,
    UnknownClass,
    WrongVersion,
)
from support.database import Database
from support.jobs import CLASS, Background, Conn, begun, claimed, given, save, show, two, waiting
from support.patience import patient

OTHER = "report.other"
THEM = "old-queue"
ADMIN = By("ann", "moves to the old queue", "change 12")


def theirs(conn: Conn) -> None:
    """A class of its own store for the other implementation, which owns the class from now on."""
    conn.execute(
        "DROP TABLE IF EXISTS theirs; CREATE TABLE theirs (tenant text, operation text PRIMARY KEY, attempts integer)"
    )
    hand_over(conn, ADMIN, CLASS, to=THEM)


def take(conn: Conn, limit: int = 1000) -> list[Taken]:
    """What the other implementation does: takes jobs over and stores them, in one transaction."""
    with conn.transaction():
        jobs = take_over(conn, CLASS, THEM, limit)
        for job in jobs:
            conn.execute("INSERT INTO theirs VALUES (%s, %s, %s)", (job.tenant, job.operation, job.attempts))
    return jobs


def places(conn: Conn) -> dict[str, list[str]]:
    """Where each job can run: here, there."""
    here = conn.execute("SELECT operation FROM fencepost.job WHERE exec IN ('queued', 'running') ORDER BY 1").fetchall()
    there = conn.execute("SELECT operation FROM theirs ORDER BY 1").fetchall()
    return {"here": [o for (o,) in here], "there": [o for (o,) in there]}


def test_a_class_of_another_implementation_is_claimed_by_it_alone_and_back_again(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "op-1")
        given(conn, "op-2", job_class=OTHER)
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["op-1"], "the control: ours is claimed"
        with pytest.raises(SecondOwner, match=f"{CLASS} belongs to fencepost") as refused:
            own(conn, CLASS, THEM)
        assert refused.value.field == "class"
        own(conn, CLASS, FENCEPOST)
        cancel(conn, "t", "op-1", CLASS, actor="ann", reason="control")

        assert hand_over(conn, ADMIN, CLASS, to=THEM) == FENCEPOST
        assert hand_over(conn, ADMIN, CLASS, to=THEM) == THEM, "once more changes nothing"
        own(conn, CLASS, THEM)
        given(conn, "op-3")
        for classes in ([CLASS], [OTHER, CLASS]):
            with pytest.raises(SecondOwner, match=f"{CLASS} belongs to {THEM}") as refused:
                claim(conn, "w", classes, 10)
            assert refused.value.hint is not None and "fencepost jobs owner" in refused.value.hint
        with pytest.raises(SecondOwner):
            own(conn, CLASS, "a-third")
        assert [job.operation for job in claim(conn, "w", [OTHER], 10)] == ["op-2"]
        held = [(h.what, h.owner, h.count) for h in holds(conn) if h.what.startswith("owned")]
        assert held == [(f"owned by {THEM}", THEM, 1)], "accepted, and told why it waits"

        with pytest.raises(EvidenceMissing) as missing:
            hand_over(conn, By("ann", "back"), CLASS, to=FENCEPOST)
        assert missing.value.field == "evidence"
        assert hand_over(conn, By("ann", "back", "it is stopped"), CLASS, to=FENCEPOST) == THEM
        with pytest.raises(SecondOwner):
            own(conn, CLASS, THEM)
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["op-3"]


def test_the_owner_keeps_a_class_until_it_has_drained(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "op-1", policy="resumable")
        running = claimed(conn, "op-1")
        with pytest.raises(SecondOwner, match="running") as refused:
            hand_over(conn, ADMIN, CLASS, to=THEM)
        assert refused.value.field == "running"
        attempt = begun(conn, running.fence)
        cancel(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        with pytest.raises(EffectOpen):
            hand_over(conn, ADMIN, CLASS, to=THEM)
        assert attempt
        with pytest.raises(UnknownClass):
            hand_over(conn, ADMIN, "never.registered", to=THEM)
        given(conn, "op-2", job_class=OTHER)
        job = claimed(conn, "op-2", job_class=OTHER)
        publish(conn, job.fence, lambda c: save(c, "op-2"))
        assert hand_over(conn, ADMIN, OTHER, to=THEM) == FENCEPOST


def test_a_hand_over_says_who_why_and_about_which_version(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        (version,) = conn.execute("SELECT max(seq) FROM fencepost.authority_log").fetchone() or (0,)
        with pytest.raises(WrongVersion):
            hand_over(conn, By("ann", "why", version=version - 1), CLASS, to=THEM)
        hand_over(conn, By("ann", "why", "change 12", version), CLASS, to=THEM)
        row = conn.execute("SELECT kind, detail FROM fencepost.authority_log ORDER BY seq DESC LIMIT 1").fetchone()
        told = {"class": CLASS, "from": FENCEPOST, "to": THEM, "actor": "ann", "reason": "why", "evidence": "change 12"}
        assert row == ("handed_over", told)
        assert conn.execute("SELECT fencepost.verify_authority()").fetchone() == (None,)


def test_a_hand_over_waits_for_the_claim_under_way_and_sees_what_it_started(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        assert len(claim(manual, "w", [CLASS], 1)) == 1
        admin = Background(database18, patient(lambda conn: hand_over(conn, ADMIN, CLASS, to=THEM)))
        waiting(auto, admin.pid)
        manual.commit()
        with pytest.raises(SecondOwner, match="running"):
            admin.outcome()


def test_an_owner_that_has_asked_keeps_the_class_until_its_transaction_ends(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        hand_over(auto, ADMIN, CLASS, to=THEM)
        own(manual, CLASS, THEM)
        with pytest.raises(SecondOwner):
            claim(auto, "w", [CLASS], 1)
        admin = Background(database18, patient(lambda conn: hand_over(conn, ADMIN, CLASS, to=FENCEPOST)))
        waiting(auto, admin.pid)
        manual.commit()
        assert admin.outcome() == THEM
        assert len(claim(auto, "w", [CLASS], 1)) == 1


def test_an_older_snapshot_never_reads_the_owner_before(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        manual.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        own(manual, CLASS, FENCEPOST)
        manual.rollback()
        manual.execute("SELECT count(*) FROM fencepost.job")
        hand_over(auto, ADMIN, CLASS, to=THEM)
        with pytest.raises(psycopg.errors.SerializationFailure):
            claim(manual, "w", [CLASS], 1)


def test_each_job_is_in_one_place_there_and_back_again(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for n in range(5):
            given(conn, f"op-{n}", max_attempts=9)
        for job in claim(conn, "w", [CLASS], 10):
            release(conn, job.fence)
        theirs(conn)
        assert (len(take(conn, 2)), len(take(conn, 2)), len(take(conn)), len(take(conn))) == (2, 2, 1, 0)
        assert places(conn) == {"here": [], "there": [f"op-{n}" for n in range(5)]}
        assert conn.execute("SELECT count(*) FROM fencepost.agenda WHERE priority = 0").fetchone() == (0,)

        assert not given_again(conn, "op-1"), "the same job, and it starts nothing here"
        for act in (requeue, cancel):
            with pytest.raises(SecondOwner, match=f"taken over by {THEM}") as refused:
                act(conn, "t", "op-1", CLASS, actor="ann", reason="why")
            assert refused.value.field == "operation"

        with conn.transaction():
            conn.execute("DELETE FROM theirs WHERE operation IN ('op-1', 'op-2')")
            give_back(conn, CLASS, THEM, [("t", "op-1", 3), ("t", "op-2", 0)])
        assert places(conn) == {"here": ["op-1", "op-2"], "there": ["op-0", "op-3", "op-4"]}
        with pytest.raises(SecondOwner):
            claim(conn, "w", [CLASS], 10)
        hand_over(conn, ADMIN, CLASS, to=FENCEPOST)
        jobs = {job.operation: job.attempts for job in claim(conn, "w", [CLASS], 10)}
        assert jobs == {"op-1": 4, "op-2": 1}, "the attempts go on where they were"
        decided = conn.execute(
            "SELECT kind, actor, verdict FROM fencepost.decision WHERE kind IN ('take_over', 'give_back') ORDER BY id"
        ).fetchall()
        assert decided == [
            ("take_over", THEM, "2 transferred"),
            ("take_over", THEM, "2 transferred"),
            ("take_over", THEM, "1 transferred"),
            ("give_back", THEM, "2 given back"),
        ]


def test_a_transfer_that_does_not_commit_moves_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        theirs(conn)
        with conn.transaction(force_rollback=True):
            assert [job.operation for job in take_over(conn, CLASS, THEM)] == ["op-1"]
        assert (show(conn), places(conn)) == ("queued", {"here": ["op-1"], "there": []})
        assert len(take(conn)) == 1
        with conn.transaction(force_rollback=True):
            conn.execute("DELETE FROM theirs")
            give_back(conn, CLASS, THEM, [("t", "op-1", 0)])
        assert (show(conn), places(conn)) == ("cancelled", {"here": [], "there": ["op-1"]})


def test_work_with_an_effect_on_record_stays_where_the_record_is(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "plain")
        given(conn, "applied")
        conn.execute("UPDATE fencepost.job SET applied_effects = 1 WHERE operation = 'applied'")
        theirs(conn)
        assert [job.operation for job in take(conn)] == ["plain"]
        assert show(conn, "applied") == "queued"


def test_nothing_is_given_back_that_is_not_there(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "op-1")
        given(conn, "op-2")
        theirs(conn)
        assert len(take(conn, 1)) == 1
        (there,) = places(conn)["there"]
        (here,) = places(conn)["here"]
        cases: list[list[tuple[str, str, int]]] = [
            [("t", here, 0)],
            [("t", there, 0), ("t", here, 0)],
            [("t", there, 0), ("t", there, 0)],
            [("other", there, 0)],
        ]
        for jobs in cases:
            with pytest.raises(SecondOwner):
                give_back(conn, CLASS, THEM, jobs)
        with pytest.raises(SecondOwner):
            give_back(conn, CLASS, "a-third", [("t", there, 0)])
        assert show(conn, there) == "cancelled"
        give_back(conn, CLASS, THEM, [("t", there, 0)])
        assert show(conn, there) == "queued"


def test_a_job_that_failed_for_a_reason_of_that_name_is_here(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        assert fail(conn, claimed(conn).fence, "transferred", final=True) == "poison"
        requeue(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        assert show(conn) == "queued"
        fail(conn, claimed(conn).fence, "transferred", final=True)
        assert cancel(conn, "t", "op-1", CLASS, actor="ann", reason="why") == "cancelled"
        assert cancel(conn, "t", "op-1", CLASS, actor="ann", reason="why") == "already_cancelled"
        theirs(conn)
        with pytest.raises(SecondOwner):
            give_back(conn, CLASS, THEM, [("t", "op-1", 0)])


@pytest.mark.parametrize("limit", [0, 1001])
def test_batches_are_bounded(database18: Database, limit: int) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        theirs(conn)
        with pytest.raises(InvalidInput) as taking:
            take_over(conn, CLASS, THEM, limit)
        with pytest.raises(InvalidInput) as giving:
            give_back(conn, CLASS, THEM, [("t", f"op-{n}", 0) for n in range(limit)])
        assert (taking.value.field, giving.value.field) == ("limit", "jobs")
        with pytest.raises(InvalidInput):
            take_over(conn, CLASS, FENCEPOST, 1)
        assert len(take(conn, 1)) == 1


def given_again(conn: Conn, operation: str) -> bool:
    """Whether the same submission makes a new job."""
    with conn.transaction():
        return bool(submit(conn, CLASS, tenant="t", operation=operation, args={"n": 1}))


def test_a_job_that_has_begun_anything_stays_whatever_became_of_it(database18: Database) -> None:
    """A receipt that comes late blocks it, and nobody could tell that to another implementation."""
    with database18.connect(autocommit=True) as conn:
        given(conn, "op-1")
        fence = claimed(conn, "op-1").fence
        attempt = begun(conn, fence)
        record(conn, fence, "e1", attempt, "failed_before_dispatch", reason="refused")
        release(conn, fence)
        given(conn, "op-2")
        theirs(conn)

        assert [job.operation for job in take(conn)] == ["op-2"]

        assert record(conn, fence, "e1", attempt, "success", receipt="r-1") == "unknown"
        assert show(conn, "op-1") == "blocked"
