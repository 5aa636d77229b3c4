"""Rotation, freeze, restriction, release and seal: what is allowed before and after, and what is refused meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from fencepost.jobs import authority
from fencepost.jobs.authority import By, freeze, lift, release, restrict, rotate, seal, thaw
from fencepost.jobs.claim import claim, marks
from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.recovery import holds, recover
from fencepost.jobs.renew import renew
from fencepost.jobs.worker import Worker
from fencepost.schemas import arming
from fencepost.schemas.errors import (
    ConfigError,
    EffectOpen,
    EpochFrozen,
    InvalidInput,
    NotArmed,
    Restricted,
    StaleFence,
    UnknownJob,
    WitnessMismatch,
    WrongVersion,
)
from fencepost.schemas.witness import FileWitness
from fencepost.schemas.witness_database import DatabaseWitness
from support.database import Database, Databases
from support.jobs import (
    CLASS,
    Background,
    Conn,
    age_effect,
    begun,
    claimed,
    column,
    effect,
    given,
    results,
    save,
    show,
    two,
    waiting,
)
from support.processes import wait_for
from support.restores import restores
from support.roles import separated
from support.workers import publishing, running

BY = By("ann", "why", "ticket 7")


def version(conn: Conn) -> int:
    row = conn.execute("SELECT max(seq) FROM fencepost.authority_log").fetchone()
    assert row is not None
    return int(row[0])


def newest(conn: Conn) -> tuple[str, dict[str, Any]]:
    row = conn.execute("SELECT kind, detail FROM fencepost.authority_log ORDER BY seq DESC LIMIT 1").fetchone()
    assert row is not None
    return row[0], row[1]


def rotated(database: Database, **options: Any) -> authority.Rotated:
    return rotate(database.dsn, database.state, BY, **options)


def write(f: Fence) -> Callable[[Conn], object]:
    return lambda conn: publish(conn, f, lambda tx: save(tx, f.operation))


def test_a_rotation_holds_running_and_queued_work_until_it_is_released(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "running")
        given(conn, "queued")
        mine = claimed_one(conn, "running")
        renew(conn, mine)  # the control

        done = rotated(database, tenant="t")

        assert (done.held, done.blocked) == (1, 0)
        assert show(conn, "running") == "held" and column(conn, "reason", "running") == "old_epoch"
        with pytest.raises(StaleFence):
            write(mine)(conn)
        assert claim(conn, "b", [CLASS], 10) == []
        assert show(conn, "queued") == "queued"
        assert {h.what: h.count for h in holds(conn) if h.tenant == "t"} == {"frozen": 1, "can resume": 2}

        assert release(conn, BY, tenant="t").released == 2
        jobs = claim(conn, "b", [CLASS], 10)
        assert {j.operation for j in jobs} == {"running", "queued"} and {j.fence.epoch for j in jobs} == {done.epoch}
        for job in jobs:
            write(job.fence)(conn)
        with pytest.raises(StaleFence):
            write(mine)(conn)
        assert results(conn, "running") == ["a"]


def claimed_one(conn: Conn, operation: str) -> Fence:
    """The claim of one job of several."""
    rest = conn.execute(
        "UPDATE fencepost.job SET run_at = run_at + interval '1 hour' WHERE operation <> %(o)s AND exec = 'queued'"
        " RETURNING operation",
        {"o": operation},
    ).fetchall()
    fence = claimed(conn, operation).fence
    conn.execute(
        "UPDATE fencepost.job SET run_at = run_at - interval '1 hour' WHERE operation = ANY (%(o)s)",
        {"o": [row[0] for row in rest]},
    )
    return fence


def test_a_rotation_of_one_tenant_leaves_the_others_alone_and_one_of_everybody_does_not(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "ours", tenant="t")
        given(conn, "theirs", tenant="u")
        fences = {str(j.operation): j.fence for j in claim(conn, "a", [CLASS], 10)}

        rotated(database18, tenant="t")

        renew(conn, fences["theirs"])
        with pytest.raises(StaleFence):
            renew(conn, fences["ours"])
        rotated(database18)
        with pytest.raises(StaleFence):
            renew(conn, fences["theirs"])
        assert release(conn, BY).released == 2


def test_a_pending_effect_blocks_what_a_rotation_takes_away(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        begun(conn, claimed(conn).fence)

        assert rotated(database18, tenant="t").blocked == 1

        assert show(conn) == "blocked" and effect(conn, "state") == "unknown"
        with pytest.raises(EffectOpen):
            release(conn, BY, tenant="t", job_class=CLASS, operation="op-1")
        assert release(conn, BY, tenant="t") == (0, 1, None)
        age_effect(conn)
        reconcile(
            *(conn, "t", "op-1", "e1"),
            version=effect(conn, "version"),
            verdict="not_applied",
            actor="ann",
            reason="asked",
            evidence_kind="provider_statement",
            evidence_ref="provider/1",
        )
        assert claim(conn, "b", [CLASS], 10) == []  # queued, and of the old epoch
        assert release(conn, BY, tenant="t", job_class=CLASS, operation="op-1").released == 1  # the control
        thaw(conn, BY, tenant="t")
        begun(conn, claimed(conn).fence)


def test_release_goes_in_batches_and_gives_no_attempt_beyond_the_budget(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for n in range(5):
            given(conn, f"op-{n}", max_attempts=1)
        claimed_one(conn, "op-3")
        rotated(database18)

        seen, after = 0, None
        for _ in range(3):
            batch = release(conn, BY, limit=2, after=after)
            seen, after = seen + batch.released, batch.after
        assert seen == 5 and after is None
        assert show(conn, "op-3") == "poison" and column(conn, "reason", "op-3") == "attempts_exhausted"
        assert len(claim(conn, "b", [CLASS], 10)) == 4
        with pytest.raises(UnknownJob):
            release(conn, BY, tenant="t", job_class=CLASS, operation="none")


def test_a_freeze_stops_begins_and_nothing_else(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        mine = claimed(conn).fence
        for tenant in ("t", None):
            freeze(conn, BY, tenant=tenant)
            with pytest.raises(EpochFrozen):
                begun(conn, mine)
            renew(conn, mine)
            thaw(conn, BY, tenant=tenant)
        begun(conn, mine)


@pytest.mark.parametrize(("kind", "subject"), [("tenant", "t"), ("class", CLASS)])
def test_restricted_work_is_held_and_not_claimed_until_it_is_lifted(
    database18: Database, kind: authority.Kind, subject: str
) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "running")
        given(conn, "queued")
        mine = claimed_one(conn, "running")

        assert restrict(database18.dsn, database18.state, BY, kind, subject).held == 0

        assert show(conn, "running") == "held"
        with pytest.raises(StaleFence):
            write(mine)(conn)
        assert claim(conn, "b", [CLASS], 10) == []
        with pytest.raises(Restricted):
            if kind == "tenant":
                release(conn, BY, tenant=subject)
            release(conn, BY, job_class=subject)
        assert release(conn, BY).released == 0
        assert not lift(database18.dsn, database18.state, BY, kind, "another")
        assert lift(database18.dsn, database18.state, BY, kind, subject)
        assert FileWitness(database18.state).read().restrictions == ()
        assert [j.operation for j in claim(conn, "b", [CLASS], 10)] == ["queued"]
        assert release(conn, BY, tenant="t").released == 1
        assert [j.operation for j in claim(conn, "b", [CLASS], 10)] == ["running"]


def test_a_revoked_login_is_refused_everything_and_another_is_not(databases18: Databases) -> None:
    with separated(databases18) as roles:
        one, other = roles.login("executor"), roles.login("executor", "reader")
        with roles.database.connect(autocommit=True) as conn:
            given(conn)
        with one.connect(autocommit=True) as a, other.connect(autocommit=True) as b:
            assert claim(a, "a", [CLASS], 1)

            restrict(roles.database.dsn, roles.database.state, BY, "principal", roles.name("executor"))

            with pytest.raises(Restricted):
                claim(a, "a", [CLASS], 1)
            (myself,) = b.execute("SELECT session_user").fetchone() or ("",)
            with pytest.raises(InvalidInput):
                restrict(other.dsn, roles.database.state, BY, "principal", myself)
            assert claim(b, "b", [CLASS], 1) == []
            lift(roles.database.dsn, roles.database.state, BY, "principal", roles.name("executor"))
            assert claim(a, "a", [CLASS], 1) == []


def test_nothing_is_lifted_that_the_witness_cannot_be_told_of(database18: Database) -> None:
    restrict(database18.dsn, database18.state, BY, "tenant", "t")
    path = FileWitness(database18.state).path
    path.rename(path.with_suffix(".away"))
    with database18.connect(autocommit=True) as conn:
        for dry_run in (True, False):
            with pytest.raises(ConfigError):
                lift(database18.dsn, database18.state, BY, "tenant", "t", dry_run=dry_run)
        assert "suspended" in [h.what for h in holds(conn)]
        path.with_suffix(".away").rename(path)
        assert lift(database18.dsn, database18.state, BY, "tenant", "t")  # the control
        assert "suspended" not in [h.what for h in holds(conn)]


def test_a_change_about_an_older_version_is_refused_and_every_one_is_in_the_chain(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        looked_at = version(conn)
        freeze(conn, By("ann", "why", version=looked_at), tenant="t")  # the control
        kind, detail = newest(conn)
        assert kind == "frozen" and (detail["actor"], detail["reason"], detail["tenant"]) == ("ann", "why", "t")

        for late in (
            lambda: thaw(conn, By("ann", "why", version=looked_at), tenant="t"),
            lambda: release(conn, By("ann", "why", version=looked_at)),
            lambda: rotate(database18.dsn, database18.state, By("ann", "why", version=looked_at)),
            lambda: restrict(database18.dsn, database18.state, By("ann", "why", version=looked_at), "tenant", "t"),
            lambda: lift(database18.dsn, database18.state, By("ann", "why", version=looked_at), "tenant", "t"),
            lambda: seal(database18.dsn, database18.state, By("ann", "why", version=looked_at)),
        ):
            with pytest.raises(WrongVersion):
                late()
        assert arming.read_tip(conn).armed
        rotated(database18)
        assert conn.execute("SELECT fencepost.verify_authority()").fetchone() == (None,)
        entry = version(conn)
        conn.execute("SET session_replication_role = replica")
        conn.execute(
            'UPDATE fencepost.authority_log SET detail = detail || \'{"reason": "other"}\' WHERE seq = %s', (entry,)
        )
        assert conn.execute("SELECT fencepost.verify_authority()").fetchone() == (entry,)
        conn.execute(
            'UPDATE fencepost.authority_log SET detail = detail || \'{"reason": "why"}\' WHERE seq = %s', (entry,)
        )
        assert conn.execute("SELECT fencepost.verify_authority()").fetchone() == (None,)


def test_a_dry_run_says_what_would_happen_and_changes_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        mine = claimed(conn).fence
        before, witness = version(conn), FileWitness(database18.state).read()

        would = rotated(database18, tenant="t", dry_run=True)
        restrict(database18.dsn, database18.state, BY, "tenant", "t", dry_run=True)
        seal(database18.dsn, database18.state, BY, dry_run=True)

        assert version(conn) == before and FileWitness(database18.state).read() == witness
        renew(conn, mine)
        assert rotated(database18, tenant="t") == would  # the control


def test_a_rotation_waits_for_a_publication_under_way_and_what_comes_later_waits_for_it(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto, "early")
        given(auto, "late")
        early, late = claimed_one(auto, "early"), claimed_one(auto, "late")
        fence(manual, early)
        save(manual, "early")
        behind = threading.Event()

        def write_late(conn: Conn) -> None:
            assert behind.wait(20)
            write(late)(conn)

        # Its session is there before: the rotation waits for the gate for a few seconds only.
        after = Background(database, write_late)
        rotation = Background(database, lambda _: rotated(database, tenant="t"))
        query = "SELECT count(*) FROM pg_locks WHERE mode = 'ExclusiveLock' AND NOT granted AND relation = 'fencepost.gate'::regclass"
        wait_for(lambda: auto.execute(query).fetchone() == (1,), 10, "the rotation to wait for the gate")
        behind.set()
        waiting(auto, after.pid)
        complete(manual, early)
        manual.commit()

        assert rotation.outcome().held == 1
        with pytest.raises(StaleFence):
            after.outcome()
        assert results(auto, "early") == ["a"] and results(auto, "late") == []


def test_a_rotation_that_cannot_have_the_gate_changes_nothing(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        mine = claimed(auto).fence
        manual.execute("LOCK TABLE fencepost.gate IN ROW SHARE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            rotated(database18, tenant="t")
        manual.rollback()
        renew(auto, mine)
        assert rotated(database18, tenant="t").held == 1  # the control


def test_a_rotation_needs_an_armed_database_and_its_witness(database18: Database, databases18: Databases) -> None:
    other = databases18.migrated()
    try:
        with pytest.raises(WitnessMismatch):
            rotate(database18.dsn, other.state, BY)
    finally:
        databases18.drop(other)
    with database18.connect(autocommit=True) as conn:
        assert arming.read_tip(conn).armed
        conn.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(NotArmed):
            freeze(conn, BY)
        # A refused rotation leaves the database as a keeper would find it, and as it would leave it.
        with pytest.raises(NotArmed):
            rotated(database18)
        assert arming.read_tip(conn).armed
        rotated(database18)  # the control


def dies(*_: object) -> None:
    """No keeper is there."""


def test_a_restriction_whose_commit_is_lost_is_put_into_force_by_the_next_arm(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        restrict(database18.dsn, database18.state, BY, "tenant", "u")  # the control
        with monkeypatch.context() as patch:
            patch.setattr(authority, "ROTATE", "SELECT 1 / 0, 1")
            patch.setattr(arming, "ensure_armed", dies)
            with pytest.raises(psycopg.errors.DivisionByZero):
                restrict(database18.dsn, database18.state, BY, "tenant", "t")
        with pytest.raises(NotArmed):
            claim(conn, "a", [CLASS], 1)
        arming.ensure_armed(database18.dsn, database18.state)
        assert claim(conn, "a", [CLASS], 1) == []
        assert {h.tenant for h in holds(conn) if h.what == "suspended"} == {"t", "u"}
        for tenant in ("t", "u"):
            lift(database18.dsn, database18.state, BY, "tenant", tenant)
        assert claim(conn, "a", [CLASS], 1)


def test_a_second_database_is_told_of_every_change_as_a_file_is(database18: Database, databases18: Databases) -> None:
    second = databases18.empty()
    try:
        outside = DatabaseWitness(second.dsn)
        arming.create_witness(database18.dsn, outside)
        epoch = rotate(database18.dsn, outside, BY, tenant="t").epoch
        restrict(database18.dsn, outside, BY, "class", "other")
        assert (outside.read().epoch, outside.read().restrictions) == (epoch, ("class:other",))
        assert lift(database18.dsn, outside, BY, "class", "other")
        seal(database18.dsn, outside, BY)
        assert outside.read().head.sealed
        arming.arm(database18.dsn, outside, unseal=True)
        with database18.connect(autocommit=True) as conn:
            assert arming.beat(conn, outside) == outside.read().head.seq
        # For the tests that come: the file says the same again.
        arming.create_witness(database18.dsn, database18.state)
    finally:
        databases18.drop(second)


def test_pointers_to_held_work_are_forgotten_and_made_again_by_its_release(database18: Database) -> None:
    query = "SELECT count(*) FROM fencepost.agenda"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        rotated(database18, tenant="t")
        assert conn.execute(query).fetchone() == (1,)
        hint: list[str | None] = [None]

        def forgotten() -> bool:
            hint[0] = marks(conn, [CLASS], hint[0])
            return conn.execute(query).fetchone() == (0,)

        wait_for(forgotten, 20, "the pointer to be forgotten")
        release(conn, BY, tenant="t")
        assert [j.operation for j in claim(conn, "b", [CLASS], 10)] == ["op-1"]


def test_a_pointer_of_before_a_release_is_forgotten_and_the_one_it_made_is_not(database18: Database) -> None:
    query = "SELECT array_agg(epoch ORDER BY epoch) FROM fencepost.agenda"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        rotated(database18, tenant="t")
        release(conn, BY, tenant="t")
        assert conn.execute(query).fetchone() == ([1, 2],)
        hint: list[str | None] = [None]

        def forgotten() -> bool:
            hint[0] = marks(conn, [CLASS], hint[0])
            return conn.execute(query).fetchone() == ([2],)

        wait_for(forgotten, 20, "the older pointer to be forgotten")
        assert [j.fence.epoch for j in claim(conn, "b", [CLASS], 10)] == [2]


def test_an_idle_worker_forgets_the_pointers_to_a_long_backlog_that_is_held(database18: Database) -> None:
    count = 250
    query = "SELECT count(*) FROM fencepost.agenda"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        for number in range(2, count + 1):
            given(conn, f"op-{number}")
        rotated(database18, tenant="t")
        assert conn.execute(query).fetchone() == (count,)
        hint = marks(conn, [CLASS])
        seen = {count}

        def forgotten() -> bool:
            nonlocal hint
            hint = marks(conn, [CLASS], hint)
            row = conn.execute(query).fetchone()
            assert row is not None
            seen.add(row[0])
            return bool(row[0] == 0)

        wait_for(forgotten, 20, "the pointers to be forgotten")
        # One look saw that all of the first were stale, and took the rest with them.
        assert seen == {count, 0}

        release(conn, BY, tenant="t")
        rotated(database18, tenant="t")
        assert conn.execute(query).fetchone() == (count,)
        with running(publishing(Worker()), database18):
            wait_for(lambda: conn.execute(query).fetchone() == (0,), 20, "an idle worker to forget them")
        assert {h.what: h.count for h in holds(conn) if h.tenant == "t"}["can resume"] == count


def test_a_sealed_database_stays_disarmed_where_it_is_until_somebody_breaks_the_seal(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        seal(database18.dsn, database18.state, BY)

        with pytest.raises(NotArmed):
            claim(conn, "a", [CLASS], 1)
        with pytest.raises(WitnessMismatch) as caught:
            arming.ensure_armed(database18.dsn, database18.state)
        assert caught.value.field == "sealed"
        arming.arm(database18.dsn, database18.state, unseal=True)
        assert claim(conn, "a", [CLASS], 1)


def test_a_sealed_database_arms_itself_elsewhere_and_the_one_it_left_does_not(databases18: Databases) -> None:
    with restores(databases18) as made:
        with made.live.connect(autocommit=True) as conn:
            given(conn)
        seal(made.live.dsn, made.live.state, BY)
        name = made.copy()
        elsewhere = made.restored(name)

        # A copy with another number, as a move by dump makes it; nothing of it is older than the seal.
        arming.ensure_armed(elsewhere.dsn, elsewhere.state)

        with elsewhere.connect(autocommit=True) as conn:
            assert claim(conn, "a", [CLASS], 1)
            arming.beat(conn, FileWitness(elsewhere.state))
        with pytest.raises(WitnessMismatch):
            arming.arm(made.live.dsn, made.live.state, unseal=True)


@pytest.mark.parametrize("act", ["freeze", "freeze everybody", "disable", "revoke nobody", "seal"])
def test_an_older_snapshot_never_reads_the_authority_before(database18: Database, act: str) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        given(auto, "other")
        mine, other = claimed_one(auto, "op-1"), claimed_one(auto, "other")

        def older() -> None:
            manual.rollback()
            manual.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            manual.execute("SELECT count(*) FROM fencepost.job")

        older()
        begun(manual, other)  # the control
        manual.commit()
        older()
        match act:
            case "freeze":
                freeze(auto, BY, tenant="t")
            case "freeze everybody":
                freeze(auto, BY)
            case "disable":
                restrict(database18.dsn, database18.state, BY, "class", "another")
            case "revoke nobody":
                restrict(database18.dsn, database18.state, BY, "principal", "eve")
                lift(database18.dsn, database18.state, BY, "principal", "eve")
            case _:
                seal(database18.dsn, database18.state, BY)
        with pytest.raises(psycopg.errors.SerializationFailure):
            begun(manual, mine)
        manual.rollback()
        if act == "seal":
            arming.arm(database18.dsn, database18.state, unseal=True)
        assert effect(auto, "state", "other") == "pending"


def test_a_revoked_admin_changes_no_authority_and_takes_none_away(databases18: Databases) -> None:
    with separated(databases18) as roles:
        admin, state = roles.login("authority_admin", "reader"), roles.database.state
        other = roles.login("reconciler")
        with roles.database.connect(autocommit=True) as conn:
            given(conn)
        acts: tuple[tuple[str, tuple[object, ...]], ...] = (
            ("SELECT fencepost.pause('class', %s, 'ann', 'why')", (CLASS,)),
            ("SELECT fencepost.resume('class', %s, 'ann', 'why')", (CLASS,)),
            ("SELECT fencepost.signal('t', 'op-1', %s, 'approved', 'x')", (CLASS,)),
        )
        with other.connect(autocommit=True) as conn:
            for act, values in acts:
                conn.execute(act.encode(), values)  # the control
            restrict(roles.database.dsn, state, BY, "principal", roles.name("reconciler"))
            for act, values in acts:
                with pytest.raises(Restricted):
                    conn.execute(act.encode(), values)
        freeze_and_thaw(admin)  # the control
        arming.arm(admin.dsn, state)
        restrict(roles.database.dsn, state, BY, "principal", roles.name("authority_admin", "reader"))

        with admin.connect(autocommit=True) as conn:
            with pytest.raises(Restricted):
                conn.execute("SELECT fencepost.disarm()")
            with pytest.raises(Restricted):
                freeze(conn, BY)
        for refused in (
            lambda: arming.arm(admin.dsn, state),
            lambda: rotate(admin.dsn, state, BY),
            lambda: lift(admin.dsn, state, BY, "principal", roles.name("authority_admin", "reader")),
        ):
            with pytest.raises(Restricted):
                refused()
        with roles.database.connect(autocommit=True) as conn:
            assert arming.read_tip(conn).armed
            conn.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(Restricted):
            arming.ensure_armed(admin.dsn, state)
        with pytest.raises(Restricted):
            recover(admin.dsn, state, BY)
        assert not arming.ensure_armed(roles.database.dsn, state).already
        lift(roles.database.dsn, state, BY, "principal", roles.name("authority_admin", "reader"))
        freeze_and_thaw(admin)


def freeze_and_thaw(database: Database) -> None:
    """What an authority admin may do."""
    with database.connect(autocommit=True) as conn:
        freeze(conn, BY)
        thaw(conn, BY)
