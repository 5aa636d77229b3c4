"""Guards that a single condition upholds: each is tried where that condition alone decides."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from psycopg.errors import SerializationFailure

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import claim
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import complete, complete_many, fence
from fencepost.jobs.publish import published
from fencepost.jobs.reconcile import Verdict, reconcile
from fencepost.jobs.renew import renew
from fencepost.jobs.stage import stage
from fencepost.schemas.errors import EffectOpen, FencepostError, InvalidInput, OperationConflict, StaleFence
from fencepost.schemas.identity import Attempt, Epoch, OperationId, as_class, as_tenant
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    again,
    age_effect,
    begun,
    claimed,
    column,
    effect,
    expire,
    given,
    show,
    stale,
    two,
    waiting,
)

OTHER = "another.class"


def settled(conn: Conn, verdict: Verdict, operation: str = "op-1", key: str = "e1") -> str:
    """An operator's decision about an unknown effect, after its quiescence."""
    return reconcile(
        conn, "t", operation, key, version=effect(conn, "version", operation, key), verdict=verdict, evidence_kind="operator",
        evidence_ref="mail", receipt="r" if verdict == "applied" else None, decision_id=uuid4(), actor="ann", reason="why",
    )  # fmt: skip


def test_a_guess_of_the_new_epoch_does_not_renew_the_authority_of_an_old_claim(database18: Database) -> None:
    """The tenant's epoch advanced; neither the old nor the new number makes the claim current, alone or in a batch."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        renew(conn, current)
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2), ('u', 1)")
        for f in (current, stale(current, epoch=Epoch(2))):
            for act in (renew, fence):
                with pytest.raises(StaleFence) as refused:
                    act(conn, f)
                assert refused.value.field == "epoch"
            assert [error.field for error in complete_many(conn, [f]).values()] == ["epoch"]
        conn.execute("UPDATE fencepost.job SET epoch = 2")
        assert complete_many(conn, [stale(current, epoch=Epoch(2))]) == {}


def test_a_lease_is_made_longer_by_its_own_class_and_never_shorter(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "op-a", job_class="a.class", lease=900.0)
        given(conn, lease=30.0, max_effect_timeout=60.0, policy="resumable")
        given(conn, "op-z", job_class="z.class", lease=900.0)
        current = claimed(conn).fence
        renew(conn, current)
        assert _left(conn) <= timedelta(seconds=30)
        effects.record(conn, current, "e1", begun(conn, current, timeout=60.0), "success", receipt="r")
        begun(conn, current, "e2", timeout=1.0)
        renew(conn, current)
        assert timedelta(seconds=80) < _left(conn) <= timedelta(seconds=90)


def _left(conn: Conn) -> timedelta:
    row = conn.execute("SELECT lease_until - clock_timestamp() FROM fencepost.job WHERE operation = 'op-1'").fetchone()
    assert row is not None
    left: timedelta = row[0]
    return left


def test_a_failure_keeps_to_the_delay_it_was_given_and_is_final_only_without_an_open_effect(
    database18: Database,
) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        assert fail(conn, claimed(conn).fence, "why", delay=timedelta(hours=1)) == "queued"
        due = conn.execute("SELECT run_at > clock_timestamp() + interval '50 min' FROM fencepost.job").fetchone()
        assert due == (True,)
        given(conn, "op-2")
        assert fail(conn, claimed(conn, "op-2").fence, "why", final=True) == "poison"
        given(conn, "op-3")
        current = claimed(conn, "op-3").fence
        begun(conn, current)
        assert fail(conn, current, "why", final=True) == "blocked" and effect(conn, "state", "op-3") == "unknown"


def test_the_budget_of_finishes_counts_for_a_job_that_has_something_to_finish_alone(database18: Database) -> None:
    """As after a class became resumable, whose jobs have been finishing before."""
    with database18.connect(autocommit=True) as conn:
        for policy, applied, became in (
            ("strict", 1, "poison"),
            ("strict", 0, "queued"),
            ("resumable", 1, "queued"),
        ):
            operation = f"{policy}-{applied}"
            given(conn, operation, policy=policy, max_attempts=9, max_finishes=1)
            job = claimed(conn, operation)
            conn.execute(
                "UPDATE fencepost.job SET finishes = 1, applied_effects = %(applied)s WHERE operation = %(operation)s",
                {"applied": applied, "operation": operation},
            )
            assert fail(conn, job.fence, "why") == became


def test_what_was_given_back_is_charged_to_neither_budget_and_nothing_else_is_given_back(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        assert release(conn, claimed(conn).fence) == "queued" and column(conn, "attempts") == 0
        expire_after_claim(conn)
        assert release(conn, claimed(conn).fence) == "queued" and column(conn, "attempts") == 1

        current = claimed(conn).fence
        effects.record(conn, current, "e1", begun(conn, current), "success", receipt="r")
        for finishes in (1, 2):
            expire(conn)
            current = claimed(conn).fence
            assert column(conn, "finishes") == finishes
        assert release(conn, current) == "queued"
        assert (column(conn, "finishes"), column(conn, "attempts")) == (1, 2)

        given(conn, "op-2")
        current = claimed(conn, "op-2").fence
        begun(conn, current)
        assert release(conn, current) == "blocked" and column(conn, "attempts", "op-2") == 1


def expire_after_claim(conn: Conn) -> None:
    claimed(conn)
    expire(conn)


def test_neither_the_freeze_nor_the_effects_of_others_keep_a_job_from_beginning(database18: Database) -> None:
    """Of another tenant, of another operation, of another class; a frozen tenant itself begins nothing."""
    with database18.connect(autocommit=True) as conn:
        for tenant, operation, job_class in (("s", "op-1", CLASS), ("t", "op-0", CLASS), ("t", "op-1", OTHER)):
            given(conn, operation, tenant=tenant, job_class=job_class)
        for job in claim(conn, "w", [CLASS, OTHER], 9):
            begun(conn, job.fence, "another")
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch, frozen) VALUES ('s', 1, true), ('t', 1, false)")
        given(conn)
        begun(conn, claimed(conn).fence)


def test_a_key_of_another_class_is_refused_while_it_is_open_and_its_receipt_waited_for(database18: Database) -> None:
    with two(database18) as (auto, manual):
        for job_class in (CLASS, OTHER):
            given(auto, job_class=job_class)
        mine, other = (claimed(auto, job_class=job_class).fence for job_class in (CLASS, OTHER))
        attempt = begun(auto, mine)
        with pytest.raises(EffectOpen):
            again(auto, other)
        effects.record(auto, mine, "e1", attempt, "unknown")
        with pytest.raises(EffectOpen):
            again(auto, other)

        effects.record(manual, mine, "e1", attempt, "success", receipt="r")
        behind = Background(database18, lambda conn: again(conn, other))
        waiting(auto, behind.pid)
        manual.commit()
        assert behind.outcome() == effects.Recorded("r", None)


def test_a_key_that_another_class_took_and_left_meanwhile_is_still_its_own(database18: Database) -> None:
    with two(database18) as (auto, manual):
        for job_class in (CLASS, OTHER):
            given(auto, job_class=job_class)
        mine, other = (claimed(auto, job_class=job_class).fence for job_class in (CLASS, OTHER))
        attempt = begun(manual, mine)
        behind = Background(database18, lambda conn: again(conn, other))
        waiting(auto, behind.pid)
        effects.record(manual, mine, "e1", attempt, "failed_before_dispatch")
        manual.commit()
        with pytest.raises(EffectOpen):
            behind.outcome()
        with pytest.raises(OperationConflict):
            again(auto, other)
        assert effect(auto, "class") == CLASS
        begun(auto, mine)


def test_a_call_under_the_same_provider_key_keeps_the_longest_quiescence(database18: Database) -> None:
    """A keyed effect may be begun again early, and is quiet only when its first call is; another kind starts anew."""
    with database18.connect(autocommit=True) as conn:
        for kind in ("keyed", "opaque"):
            given(conn, kind, network_bound=0.0)
            first = claimed(conn, kind).fence
            begun(conn, first, kind=kind, timeout=25.0)
            fail(conn, first, "why")
            if kind == "opaque":
                age_effect(conn, kind)
            settled(conn, "not_applied", kind)
            conn.execute(
                "UPDATE fencepost.effect SET quiescent_at = clock_timestamp() + interval '25 s'"
                " WHERE operation = %(o)s", {"o": kind}
            )  # fmt: skip
            begun(conn, claimed(conn, kind).fence, kind=kind, timeout=1.0)
            left = conn.execute(
                "SELECT quiescent_at - clock_timestamp() > interval '10 s' FROM fencepost.effect WHERE operation = %(o)s",
                {"o": kind},
            ).fetchone()
            assert left == (kind == "keyed",)


def test_two_effects_that_are_settled_at_once_let_their_job_go_on(database18: Database) -> None:
    """Whoever settles the last one sees that it is the last, although both looked before the other had committed."""
    with two(database18) as (auto, manual):
        for number, second in enumerate(("reconcile", "record")):
            operation = f"op-{number}"
            given(auto, operation, policy="resumable")
            current = claimed(auto, operation).fence
            attempts = [begun(auto, current, key) for key in ("e1", "e2")]
            fail(auto, current, "why")
            age_effect(auto, operation)
            effects.record(manual, current, "e1", attempts[0], "success", receipt="r")
            late: Callable[[Conn], object] = partial(settled, verdict="applied", operation=operation, key="e2")
            if second == "record":
                late = partial(
                    effects.record,
                    f=current,
                    effect_key="e2",
                    effect_attempt=attempts[1],
                    outcome="success",
                    receipt="r",
                )
            behind = Background(database18, late)
            waiting(auto, behind.pid)
            manual.commit()
            behind.outcome()
            assert (show(auto, operation), column(auto, "open_effects", operation)) == ("queued", 0)


def test_work_that_a_receipt_stops_meanwhile_is_not_queued_again(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        attempt = begun(auto, current)
        effects.record(auto, current, "e1", attempt, "failed_before_dispatch")
        fail(auto, current, "why", final=True)
        effects.record(manual, current, "e1", attempt, "success", receipt="r")
        requeue = "SELECT fencepost.requeue('t', 'op-1', %(c)s, 'ann', 'why')"
        behind = Background(database18, lambda conn: conn.execute(requeue, {"c": CLASS}))
        waiting(auto, behind.pid)
        manual.commit()
        with pytest.raises(StaleFence) as refused:
            behind.outcome()
        assert refused.value.field == "state" and show(auto) == "blocked"


def test_only_pending_effects_are_forgotten_and_each_time_it_is_on_record(database18: Database) -> None:
    events = "SELECT count(*) FROM fencepost.effect_event WHERE effect_key = %(k)s AND became = 'unknown'"
    with database18.connect(autocommit=True) as conn:
        given(conn, policy="resumable")
        current = claimed(conn).fence
        effects.record(conn, current, "e1", begun(conn, current), "success", receipt="r")
        begun(conn, current, "e2")
        for key, state, noted in (("e1", "success", 0), ("e2", "unknown", 1)):
            conn.execute("SELECT fencepost._forget('t', 'op-1', %(k)s, 'why')", {"k": key})
            assert effect(conn, "state", key=key) == state
            assert conn.execute(events, {"k": key}).fetchone() == (noted,)


def test_a_deadline_passes_for_effects_of_the_classes_asked_for_that_nobody_runs(database18: Database) -> None:
    """And whoever holds such a job is waited for by nobody."""
    due = "SELECT fencepost._expire_effects(ARRAY[%(c)s], 9)"
    with two(database18) as (auto, manual):
        attempts: dict[str, Any] = {}
        for operation, job_class in (("gone", CLASS), ("running", CLASS), ("held", CLASS), ("other", OTHER)):
            given(auto, operation, job_class=job_class, network_bound=60.0)
            f = claimed(auto, operation, job_class=job_class).fence
            attempts[operation] = f, begun(auto, f)
            if operation != "running":
                cancel(auto, "t", operation, job_class, actor="ann", reason="why")
            assert auto.execute(due, {"c": CLASS}).fetchone() == (0,)
        for operation in attempts:
            age_effect(auto, operation)
        f, attempt = attempts["held"]
        effects.record(manual, f, "e1", attempt, "success", receipt="r")
        auto.execute("SET lock_timeout = '3s'")
        assert auto.execute(due, {"c": CLASS}).fetchone() == (1,)
        manual.commit()
        states = {operation: effect(auto, "state", operation) for operation in attempts}
        assert states == {"gone": "unknown", "running": "pending", "held": "success", "other": "pending"}


def test_a_batch_that_is_no_list_at_all_is_refused(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        with pytest.raises(InvalidInput) as refused:
            conn.execute("SELECT FROM fencepost.complete_many(NULL, NULL, NULL, NULL, NULL, NULL, NULL)")
        assert refused.value.field == "items"
        with pytest.raises(InvalidInput) as refused:
            conn.execute("SELECT FROM fencepost.complete_many('{}', '{}', '{}', '{}', '{}', '{}', '{}')")
        assert refused.value.field == "items"
        given(conn)
        assert complete_many(conn, [claimed(conn).fence]) == {}


def test_a_refused_item_of_a_batch_is_told_once_whatever_its_namesakes_are(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, tenant="u")
        given(conn, job_class=OTHER)
        mine, *_ = (
            job.fence for job in claim(conn, "w", [CLASS, OTHER], 10) if (job.tenant, job.job_class) == ("t", CLASS)
        )
        told = conn.execute(
            "SELECT item, code, field FROM fencepost.complete_many(ARRAY['t'], ARRAY['op-1'], ARRAY[%(c)s],"
            " ARRAY[%(g)s]::bigint[], ARRAY[%(a)s]::uuid[], ARRAY['another'], ARRAY[1]::bigint[])",
            {"c": CLASS, "g": mine.generation, "a": mine.attempt},
        )
        assert told.fetchall() == [(1, "ZF020", "owner")]
        assert complete_many(conn, [mine]) == {}


def test_a_begin_is_read_back_by_every_part_of_its_name_while_it_is_pending(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        attempt = begun(conn, current)
        for wrong in (
            stale(current, tenant=as_tenant("u")),
            stale(current, operation=OperationId("op-2")),
        ):
            assert effects.begun(conn, wrong, "e1", attempt) is None
        assert effects.begun(conn, current, "e2", attempt) is None
        assert effects.begun(conn, current, "e1", attempt) == effect(conn, "version")
        effects.record(conn, current, "e1", attempt, "success", receipt="r")
        assert effects.begun(conn, current, "e1", attempt) is None


def test_nothing_is_staged_for_a_job_by_an_attempt_of_another(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "op-2")
        given(conn, job_class=OTHER)
        current = claimed(conn).fence
        for wrong in (
            stale(current, operation=OperationId("op-2")),
            stale(current, job_class=as_class(OTHER)),
            stale(current, attempt=Attempt(uuid4())),
        ):
            with pytest.raises(StaleFence) as refused:
                stage(conn, wrong, {"n": 1})
            assert refused.value.field == "attempt"
        assert stage(conn, current, {"n": 1})
        assert conn.execute("SELECT operation, class FROM fencepost.staged").fetchall() == [("op-1", CLASS)]


def test_a_suspect_job_begins_what_is_on_record_and_nothing_new(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, policy="resumable")
        current = claimed(conn).fence
        effects.record(conn, current, "e1", begun(conn, current), "failed_before_dispatch", reason="refused")
        conn.execute("UPDATE fencepost.job SET suspect = true, quiescent_at = now()")
        with pytest.raises(EffectOpen) as refused:
            begun(conn, current, "e2")
        assert refused.value.field == "suspect"
        attempt = begun(conn, current)
        effects.record(conn, current, "e1", attempt, "success", receipt="r")
        conn.execute("UPDATE fencepost.job SET suspect = false")
        assert begun(conn, current, "e2")


def test_an_unknown_effect_stays_whose_it_is_and_as_old_when_evidence_contradicts_it(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        effects.record(conn, current, "e1", begun(conn, current), "unknown", reason="timeout")
        conn.execute(
            "UPDATE fencepost.effect SET assignee = 'bob', unknown_since = now() - interval '1 h', escalations = 1"
        )
        before = conn.execute("SELECT assignee, unknown_since, escalations FROM fencepost.effect").fetchone()
        conn.execute("UPDATE fencepost.effect SET contradicted = true")
        assert conn.execute("SELECT assignee, unknown_since, escalations FROM fencepost.effect").fetchone() == before
        assert effect(conn, "severity") == "critical"
        # Somebody who has looked may say that it is not.
        conn.execute("UPDATE fencepost.effect SET severity = 'normal'")
        assert effect(conn, "severity") == "normal"


def test_an_effect_escalates_once_for_each_step_and_by_the_policy_of_its_own_class(database18: Database) -> None:
    policy = "SELECT fencepost.set_escalation(%(c)s, 'ops', ARRAY['1 h', '3 h']::interval[], ARRAY[%(s)s, 'critical'], ARRAY[%(to)s, 'boss'])"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, job_class=OTHER)
        conn.execute(policy, {"c": OTHER, "s": "critical", "to": "others"})
        conn.execute(policy, {"c": CLASS, "s": "high", "to": "lead"})
        current = claimed(conn).fence
        effects.record(conn, current, "e1", begun(conn, current), "unknown", reason="timeout")
        assert conn.execute("SELECT fencepost.escalate_effects(10)").fetchone() == (0,)
        conn.execute("UPDATE fencepost.effect SET unknown_since = now() - interval '2 h'")
        for escalated in (1, 0):
            assert conn.execute("SELECT fencepost.escalate_effects(10)").fetchone() == (escalated,)
            assert (effect(conn, "severity"), effect(conn, "assignee")) == ("high", "lead")
        conn.execute("UPDATE fencepost.effect SET unknown_since = now() - interval '1 d'")
        for escalated in (1, 0):
            assert conn.execute("SELECT fencepost.escalate_effects(10)").fetchone() == (escalated,)
            assert (effect(conn, "severity"), effect(conn, "assignee")) == ("critical", "boss")


def test_a_claim_waits_at_the_gate_and_does_not_act_under_a_snapshot_from_before_a_rotation(
    database18: Database,
) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        manual.execute("LOCK TABLE fencepost.gate IN ACCESS EXCLUSIVE MODE")
        asking = Background(database18, lambda conn: [job.operation for job in claim(conn, "w", [CLASS], 1)])
        waiting(auto, asking.pid)
        manual.rollback()
        assert asking.outcome() == ["op-1"]
        given(auto, "op-2")
        for rotated in (False, True):
            manual.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            manual.execute("SELECT FROM fencepost.gate")
            if rotated:
                auto.execute("UPDATE fencepost.installation SET frozen = frozen")
                with pytest.raises(SerializationFailure):
                    manual.execute("SELECT fencepost._enter()")
            else:
                manual.execute("SELECT fencepost._enter()")
            manual.rollback()


def test_a_revoked_login_does_nothing_and_one_that_is_not_does(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO fencepost.restriction VALUES ('principal', 'somebody_else', 'why'), ('tenant', session_user, 'why')"
        )
        given(conn)
        assert claimed(conn)
        conn.execute("INSERT INTO fencepost.restriction VALUES ('principal', session_user, 'why')")
        given(conn, "op-2")
        with pytest.raises(FencepostError) as refused:
            claim(conn, "w", [CLASS], 1)
        assert refused.value.field == "principal"


def test_what_waits_for_people_is_noted_when_it_comes_and_when_it_goes_and_ordinary_runs_are_not(
    database18: Database,
) -> None:
    events = "SELECT was, became FROM fencepost.job_event WHERE operation = %s ORDER BY id"
    holds = "SELECT state FROM fencepost.job_hold"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        complete(conn, claimed(conn).fence)
        assert conn.execute(events, ("op-1",)).fetchall() == []
        given(conn, "op-2")
        cancel(conn, "t", "op-2", CLASS, actor="ann", reason="no more")
        assert conn.execute(holds).fetchall() == [("cancelled",)]
        conn.execute("UPDATE fencepost.job SET detail = 'looked at' WHERE operation = 'op-2'")
        assert conn.execute(events, ("op-2",)).fetchall() == [("queued", "cancelled")]
        conn.execute(
            "UPDATE fencepost.job SET exec = 'done', done_attempt = gen_random_uuid() WHERE operation = 'op-2'"
        )
        assert conn.execute(events, ("op-2",)).fetchall() == [("queued", "cancelled"), ("cancelled", "done")]
        assert conn.execute(holds).fetchall() == []


def test_whether_something_was_published_waits_for_the_commit_that_decides_it(database18: Database) -> None:
    for commits in (True, False):
        operation = f"op-{commits}"
        with two(database18) as (auto, manual):
            given(auto, operation)
            current = claimed(auto, operation).fence
            complete(manual, current)
            asking = Background(database18, partial(published, f=current))
            waiting(auto, asking.pid)
            manual.commit() if commits else manual.rollback()
            assert asking.outcome() is commits
