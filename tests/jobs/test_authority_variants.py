"""Each fault variant of rotation and restore on real copies of a database: first what is allowed, then the refusal.

Pairs: tests/model/PAIRS.md. A worker of before the rotation or the restore goes on under its old name in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from uuid import UUID, uuid4

import pytest

from fencepost.jobs import authority, effects, recovery
from fencepost.jobs.authority import By, freeze, release, rotate, thaw
from fencepost.jobs.claim import claim
from fencepost.jobs.fail import fail
from fencepost.jobs.fence import Fence
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.renew import renew
from fencepost.jobs.submit import submit
from fencepost.schemas import arming
from fencepost.schemas.errors import (
    EffectOpen,
    EpochFrozen,
    FencepostError,
    NotArmed,
    NotQuiescent,
    StaleEffectAttempt,
    StaleFence,
    WitnessMismatch,
)
from fencepost.schemas.identity import EffectAttempt
from fencepost.schemas.witness import FileWitness
from support.database import Database, Databases
from support.jobs import CLASS, Conn, begun, claimed, column, effect, given, results, save, show
from support.restores import Restores, recovered, restores

BY = By("ann", "why")
NOT_APPLIED = {"verdict": "not_applied", "evidence_kind": "provider_statement", "evidence_ref": "provider/1"}


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


def write(conn: Conn, f: Fence, by: str) -> None:
    publish(conn, f, lambda tx: save(tx, f.operation, by))


def record(conn: Conn, f: Fence, attempt: EffectAttempt, outcome: effects.Outcome) -> str:
    receipt = "r-1" if outcome == "success" else None
    return effects.record(conn, f, "e1", attempt, outcome, receipt=receipt)


def settle(conn: Conn, verdict: str, *, key: str = "e1", version: int | None = None) -> str:
    return reconcile(
        conn,
        "t",
        "op-1",
        key,
        version=effect(conn, "version", key=key) if version is None else version,
        verdict="applied" if verdict == "applied" else "not_applied",
        evidence_kind="provider_statement",
        evidence_ref="provider/1",
        receipt="r-9" if verdict == "applied" else None,
        actor="ann",
        reason="asked",
    )


def quiet(conn: Conn) -> None:
    """Whatever was under way when the database was lost is over."""
    conn.execute("UPDATE fencepost.effect SET quiescent_at = clock_timestamp() - interval '1 ms'")
    conn.execute("UPDATE fencepost.job SET quiescent_at = clock_timestamp() - interval '1 ms' WHERE suspect")


def test_f2_a_worker_of_the_old_epoch_publishes_and_begins_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as a, database18.connect(autocommit=True) as b:
        given(a, "control")
        write(a, claimed(a, "control").fence, "a")
        given(a)
        mine = claimed(a).fence

        rotate(database18.dsn, database18.state, BY, tenant="t")
        thaw(b, BY, tenant="t")

        # As if the rotation had not taken running work away: the epoch alone refuses.
        for running in (False, True):
            if running:
                b.execute(
                    "UPDATE fencepost.job SET exec = 'running', attempt = %s, owner = %s, generation = generation + 1,"
                    " lease_until = clock_timestamp() + interval '1 h', reason = NULL WHERE operation = 'op-1'",
                    (mine.attempt, mine.owner),
                )
                mine = replace(mine, generation=column(b, "generation"))
            for act in (partial(write, a, mine, "a"), partial(begun, a, mine), partial(renew, a, mine)):
                with pytest.raises(StaleFence) as caught:
                    act()
                assert caught.value.field == ("epoch" if running else "state")
    with database18.connect(autocommit=True) as conn:
        assert results(conn) == []


def test_f16_nobody_begins_while_frozen_although_the_work_was_released(database18: Database) -> None:
    with database18.connect(autocommit=True) as a, database18.connect(autocommit=True) as b:
        given(a, "control")
        begun(a, claimed(a, "control").fence)
        given(a)
        rotate(database18.dsn, database18.state, BY, tenant="t")
        release(b, BY, tenant="t")
        mine = claimed(a).fence

        with pytest.raises(EpochFrozen):
            begun(a, mine)

        thaw(b, BY, tenant="t")
        begun(a, mine)


@pytest.mark.parametrize("asked", ["everything", "arm"])
def test_f18_a_restored_database_does_nothing_by_itself(made: Restores, asked: str) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "control")
        write(conn, claimed_of_two(conn, "control"), "a")
        mine = claimed(conn).fence
        attempt = begun(conn, mine)
    backup = made.backup()
    old = made.restored(backup)
    if asked == "arm":
        # F28: the witness is asked, and it knows better.
        with pytest.raises(WitnessMismatch):
            arming.arm(old.dsn, old.state)
    with old.connect(autocommit=True) as conn:
        # F18b: every way to use authority tests the ticket.
        acts: tuple[Callable[[], object], ...] = (
            lambda: claim(conn, "b", [CLASS], 1),
            lambda: renew(conn, mine),
            lambda: write(conn, mine, "a"),
            lambda: fail(conn, mine, "handler_raised"),
            lambda: begun(conn, mine, "e2"),
            lambda: record(conn, mine, attempt, "success"),
            lambda: settle(conn, "applied"),
            lambda: freeze(conn, BY),
            lambda: thaw(conn, BY),
            lambda: release(conn, BY),
            lambda: conn.execute("SELECT fencepost.tick()"),
        )
        for act in acts:
            with pytest.raises(NotArmed):
                act()
        assert [h.what for h in recovery.holds(conn)] == ["disarmed"]
        recovered(old)
        conn.execute("SELECT fencepost.tick()")  # the control
        assert claim(conn, "b", [CLASS], 1) == []


def claimed_of_two(conn: Conn, operation: str) -> Fence:
    """The claim of one of them; the other waits for a moment."""
    conn.execute("UPDATE fencepost.job SET run_at = run_at + interval '1 h' WHERE operation <> %s", (operation,))
    found = claimed(conn, operation).fence
    conn.execute("UPDATE fencepost.job SET run_at = run_at - interval '1 h' WHERE operation <> %s", (operation,))
    return found


def test_f19_an_effect_that_was_not_begun_when_the_copy_was_made_is_suspect(made: Restores) -> None:
    calls: list[str] = []
    with made.live.connect(autocommit=True) as conn:
        given(conn)
        mine = claimed(conn).fence
        attempt = begun(conn, mine)
        record(conn, mine, attempt, "failed_before_dispatch")
        begun(conn, mine)  # the control: what failed before its dispatch is begun again
        fail(conn, mine, "worker_stopped")
        settle_now(conn)
    backup = made.backup()
    with made.live.connect(autocommit=True) as conn:
        begun(conn, claimed(conn).fence)
        calls.append("accepted by the provider, and forgotten by the copy")
    old = made.restored(backup)

    done = recovered(old)

    with old.connect(autocommit=True) as conn:
        assert (done.jobs, done.unknown) == (1, 1)
        assert (show(conn), effect(conn, "state"), effect(conn, "reason")) == ("blocked", "unknown", "recovered")
        thaw(conn, BY)
        with pytest.raises(EffectOpen):
            release(conn, BY, tenant="t", job_class=CLASS, operation="op-1")
        assert claim(conn, "b", [CLASS], 1) == []
        # F25: the deadline that the copy remembers is not that of the call it lost.
        with pytest.raises(NotQuiescent):
            settle(conn, "not_applied")
        assert settle(conn, "applied") == "resolved_applied"
        release(conn, BY)
        job = claim(conn, "b", [CLASS], 1)[0]
        assert job.mode == "finish"
        write(conn, job.fence, "b")
    assert len(calls) == 1


def settle_now(conn: Conn) -> None:
    """The effect is settled as not applied, its call being over: its job may begin it again."""
    quiet(conn)
    settle(conn, "not_applied")


def test_f20_the_new_epoch_is_beyond_the_witness_and_not_only_beyond_the_copy(made: Restores) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
    backup = made.backup()
    fences: list[Fence] = []
    newest = 0
    for _ in range(2):
        newest = rotate(made.live.dsn, made.live.state, BY).epoch
        with made.live.connect(autocommit=True) as conn:
            release(conn, BY)
            fences.append(claimed(conn).fence)
    old = made.restored(backup)
    with old.connect(autocommit=True) as conn:
        assert arming.read_tip(conn).epoch < newest - 1

        done = recovered(old)

        assert done.epoch == newest + 1 == FileWitness(old.state).read().epoch
        release(conn, BY)
        job = claimed(conn)
        assert job.fence.epoch == done.epoch
        for late in fences:
            with pytest.raises(StaleFence):
                write(conn, late, "a")
            with pytest.raises(StaleFence):
                write(conn, replace(late, generation=job.fence.generation), "a")
        write(conn, job.fence, "b")  # the control


def test_f23_what_a_worker_of_before_says_of_its_begin_hides_no_later_one(made: Restores) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
        mine = claimed(conn).fence
        attempt = begun(conn, mine)
        given(conn, "control")
        other = claimed(conn, "control").fence
        assert record_of(conn, other, begun(conn, other), "failed_before_dispatch") == "failed_before_dispatch"
    old = made.restored(made.backup())
    # In what was lost: the worker says that it never sent, begins again, and the provider accepts that one.
    recovered(old)

    with old.connect(autocommit=True) as conn:
        with pytest.raises(StaleEffectAttempt):
            record(conn, mine, attempt, "failed_before_dispatch")
        assert (show(conn), effect(conn, "state")) == ("blocked", "unknown")
        # A receipt is evidence, and only that.
        assert record(conn, mine, attempt, "success") == "superseded"
        assert (effect(conn, "state"), effect(conn, "contradicted")) == ("unknown", True)


def record_of(conn: Conn, f: Fence, attempt: EffectAttempt, outcome: effects.Outcome) -> str:
    return effects.record(conn, f, "e1", attempt, outcome)


def test_f26_a_job_from_before_the_recovery_is_suspect_when_it_is_submitted_again(made: Restores) -> None:
    backup = made.backup()
    event = uuid7_now(made.live)
    with made.live.connect(autocommit=True) as conn:
        given(conn, "other")
        begun(conn, claimed(conn, "other").fence)  # the control: nothing was lost here
    old = made.restored(backup)
    recovered(old)
    with old.connect(autocommit=True) as conn:
        given(conn, "new")
        thaw(conn, BY)
        begun(conn, claimed(conn, "new").fence)  # nothing says that it was there before
        with conn.transaction():
            submit(conn, CLASS, tenant="t", operation="op-1", args={"n": 1}, source_event=event)
        mine = claimed(conn).fence

        with pytest.raises(EffectOpen) as caught:
            begun(conn, mine)

        assert caught.value.field == "suspect"
        with pytest.raises(NotQuiescent):
            settle(conn, "not_applied", version=0)
        quiet(conn)
        settle(conn, "not_applied", version=0)
        begun(conn, mine)


def uuid7_now(database: Database) -> UUID:
    """An event that is accepted now."""
    with database.connect() as conn:
        row = conn.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return UUID(int=(int(row[0]) << 80) | (7 << 76) | (2 << 62) | (uuid4().int & ((1 << 62) - 1)))


class Lost(Exception):
    """The client of a rotation died."""


@pytest.mark.parametrize("tenant", ["t", None])
def test_f27_a_rotation_whose_commit_is_lost_leaves_nothing_armed_and_is_made_by_the_next_arm(
    made: Restores, tenant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise Lost

    live = made.live
    with live.connect(autocommit=True) as conn:
        given(conn)
        mine = claimed(conn).fence
        renew(conn, mine)  # the control
        with monkeypatch.context() as patch:
            patch.setattr(authority, "_one", dies)
            with pytest.raises(Lost):
                rotate(live.dsn, live.state, BY, tenant=tenant)

        with pytest.raises(NotArmed):
            write(conn, mine, "a")
        told = FileWitness(live.state).read()
        assert told.intended is not None and told.epoch == arming.read_tip(conn).epoch + 1
        assert not arming.ensure_armed(live.dsn, live.state).already
        assert arming.read_tip(conn).epoch == told.epoch
        assert (show(conn), column(conn, "reason")) == ("held", "old_epoch")
        with pytest.raises(StaleFence):
            write(conn, mine, "a")
        thaw(conn, BY, tenant=tenant)
        release(conn, BY)
        write(conn, claimed(conn).fence, "b")
        assert results(conn) == ["b"]


def test_f27_the_database_itself_refuses_to_rotate_while_it_is_armed(database18: Database) -> None:
    witness = FileWitness(database18.state)
    with witness.held(), database18.connect() as conn:
        record = arming.settled(witness.read(), arming.read_tip(conn))
        values = arming.parameters(record, record.head.rotating("t")) | BY.values()
        with pytest.raises(FencepostError) as caught:
            conn.execute(authority.ROTATE, values)
        assert caught.value.field == "armed"
        conn.rollback()
        conn.execute(authority.DISARM)
        conn.execute(authority.ROTATE, values)  # the control, and undone
        conn.rollback()


def test_f33_a_suspect_job_begins_only_what_was_reconciled(made: Restores) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn, policy="resumable")
    backup = made.backup()
    with made.live.connect(autocommit=True) as conn:
        begun(conn, claimed(conn).fence, "e2")  # the control, lost by the copy
    old = made.restored(backup)
    done = recovered(old)
    assert [(h.what, h.owner, h.count) for h in done.holds] == [
        ("effects suspect", "operator", 1),
        ("frozen", "authority admin", 1),
    ]
    with old.connect(autocommit=True) as conn:
        thaw(conn, BY)
        release(conn, BY)
        mine = claimed(conn).fence
        for key in ("e1", "e2"):
            with pytest.raises(EffectOpen):
                begun(conn, mine, key)
        quiet(conn)
        settle(conn, "not_applied", version=0)
        assert settle(conn, "applied", key="e2", version=0) == "resolved_applied"
        begun(conn, mine, "e1")
        assert isinstance(again(conn, mine, "e2"), effects.Recorded)


def again(conn: Conn, f: Fence, key: str) -> object:
    return effects.begin(
        *(conn, f, key),
        kind="opaque",
        effect_attempt=EffectAttempt(uuid4()),
        digest=effects.request_digest({"key": key}),
        timeout=5.0,
    )


def test_a_recovery_that_dies_after_it_told_the_witness_begins_anew_one_epoch_further(
    made: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
    old = made.restored(made.backup())
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "RECOVER", "SELECT 1 / 0")
        with pytest.raises(Exception, match="zero"):
            recovered(old)
    told = FileWitness(old.state).read().epoch
    with pytest.raises(WitnessMismatch):
        arming.ensure_armed(old.dsn, old.state)

    assert recovered(old).epoch == told + 1

    assert recovered(old).already
