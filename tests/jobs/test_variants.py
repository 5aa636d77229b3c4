"""Each fault variant of the protocol on two connections: first what is allowed, then the refusal (pairs: tests/model/PAIRS.md).

A and B are two workers of the same name, so that nothing here rests on who they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import claim
from fencepost.jobs.fail import fail
from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.renew import renew
from fencepost.jobs.submit import submit
from fencepost.schemas.errors import (
    EffectOpen,
    EvidenceMissing,
    NotQuiescent,
    NotUnknown,
    OperationConflict,
    StaleEffectAttempt,
    StaleFence,
)
from support.database import Database, Databases
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
    results,
    save,
    show,
    two,
    waiting,
)
from support.roles import separated

BY: dict[str, Any] = {"actor": "ann", "reason": "why"}
NOT_APPLIED: dict[str, Any] = {
    "verdict": "not_applied",
    "evidence_kind": "provider_statement",
    "evidence_ref": "provider/1",
} | BY


@contextmanager
def workers(database: Database) -> Generator[tuple[Conn, Conn]]:
    """The sessions of A and B, in autocommit."""
    with database.connect(autocommit=True) as a, database.connect(autocommit=True) as b:
        yield a, b


def stop(conn: Conn, operation: str = "op-1") -> str:
    return cancel(conn, "t", operation, CLASS, **BY)


def write(f: Fence, by: str) -> Callable[[Conn], object]:
    """The publication of a result by somebody."""
    return lambda conn: publish(conn, f, lambda tx: save(tx, f.operation, by))


def test_f1_a_superseded_worker_does_not_publish_although_the_job_is_running(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a, "control")
        write(claimed(a, "control").fence, "a")(a)
        assert results(b, "control") == ["a"]

        given(a)
        first = claimed(a).fence
        expire(a)
        second = claimed(b).fence
        assert show(a) == "running"
        with pytest.raises(StaleFence):
            write(first, "a")(a)
        write(second, "b")(b)
        assert results(a) == ["b"]


def test_f4_a_job_with_a_pending_or_unknown_effect_is_not_claimed(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        claimed(a)
        expire(a)
        second = claimed(b).fence

        attempt = begun(b, second)
        expire(a)
        for state in ("unknown", "unknown"):
            assert claim(a, "worker-a", [CLASS], 9) == [] and effect(a, "state") == state
        effects.record(b, second, "e1", attempt, "failed_before_dispatch")
        claimed(a)


def test_f5_of_two_begins_at_once_one_is_told_to_dispatch(database18: Database) -> None:
    with two(database18) as (a, manual):
        given(a)
        current = claimed(a).fence
        assert isinstance(again(manual, current), effects.Begun)
        other = Background(database18, lambda conn: again(conn, current))
        waiting(a, other.pid)
        manual.commit()
        with pytest.raises(EffectOpen):
            other.outcome()
        assert effect(a, "begins") == 1


def test_f6_reclaiming_a_lease_does_not_make_its_pending_effect_repeatable(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a, "control")
        claimed(a, "control")
        expire(a, "control")
        assert isinstance(again(b, claimed(b, "control").fence), effects.Begun)

        given(a)
        first = claimed(a).fence
        attempt = begun(a, first)
        expire(a)
        assert claim(b, "worker-a", [CLASS], 9) == []
        assert (show(b), effect(b, "state"), column(b, "open_effects")) == ("blocked", "unknown", 1)
        assert effects.record(a, first, "e1", attempt, "success", receipt="r-1") == "success"
        finish = claimed(b)
        assert finish.mode == "finish" and again(b, finish.fence) == effects.Recorded("r-1", None)


def test_f7_an_attempt_that_fails_after_its_begin_leaves_the_effect_unknown(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        first = claimed(a).fence
        effects.record(a, first, "e1", begun(a, first), "failed_before_dispatch", reason="connection_refused")
        assert fail(a, first, "handler_raised") == "queued"

        second = claimed(b).fence
        begun(b, second)
        assert fail(b, second, "handler_raised") == "blocked"
        assert effect(a, "state") == "unknown" and claim(a, "worker-a", [CLASS], 9) == []


def test_f8_a_late_outcome_does_not_touch_the_begin_of_the_successor(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        first = claimed(a).fence
        earlier = begun(a, first)
        expire(a)
        assert claim(b, "worker-a", [CLASS], 9) == []
        age_effect(a)
        reconcile(b, "t", "op-1", "e1", version=effect(b, "version"), **NOT_APPLIED)
        second = claimed(b).fence
        later = begun(b, second)
        for outcome in ("failed_before_dispatch", "unknown"):
            with pytest.raises(StaleEffectAttempt):
                effects.record(a, first, "e1", earlier, outcome)
            assert (show(b), effect(b, "state"), effect(b, "effect_attempt")) == ("running", "pending", later)
        assert effects.record(b, second, "e1", later, "success", receipt="r-1") == "success"


def test_f9_a_cancel_erases_no_effect_and_an_open_one_forbids_the_retry(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        assert stop(b) == "cancelled"
        requeue(b, "t", "op-1", CLASS, **BY)

        first = claimed(a).fence
        attempt = begun(a, first)
        assert stop(b) == "cancelled" and effect(a, "state") == "pending"
        with pytest.raises(EffectOpen):
            requeue(b, "t", "op-1", CLASS, **BY)
        effects.record(a, first, "e1", attempt, "success", receipt="r-1")
        requeue(b, "t", "op-1", CLASS, **BY)
        assert again(b, claimed(b).fence) == effects.Recorded("r-1", None)
        assert effect(a, "begins") == 1


def test_f10_a_cancelled_attempt_may_do_nothing_more(database18: Database) -> None:
    acts: list[Callable[[Conn, Fence], object]] = [
        renew,
        again,
        lambda conn, f: write(f, "a")(conn),
        lambda conn, f: fail(conn, f, "handler_raised"),
    ]
    with workers(database18) as (a, b):
        for n, act in enumerate(acts):
            given(a, f"control-{n}")
            act(a, claimed(a, f"control-{n}").fence)

            given(a, f"op-{n}")
            current = claimed(a, f"op-{n}").fence
            assert stop(b, f"op-{n}") == "cancelled"
            with pytest.raises(StaleFence):
                act(a, current)
            assert show(b, f"op-{n}") == "cancelled" and results(b, f"op-{n}") == []


def test_f11_not_applied_is_refused_while_the_call_may_be_under_way(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a, "control", network_bound=60.0)
        begun(a, claimed(a, "control").fence)
        expire(a, "control")
        assert claim(b, "worker-a", [CLASS], 9) == []
        age_effect(a, "control")
        version = effect(b, "version", "control")
        assert reconcile(b, "t", "control", "e1", version=version, **NOT_APPLIED) == "resolved_not_applied"
        cancel(b, "t", "control", CLASS, **BY)

        given(a, network_bound=60.0)
        first = claimed(a).fence
        attempt = begun(a, first)
        expire(a)
        assert claim(b, "worker-a", [CLASS], 9) == []
        version = effect(b, "version")
        with pytest.raises(NotQuiescent):
            reconcile(b, "t", "op-1", "e1", version=version, **NOT_APPLIED)
        assert (show(b), effect(b, "state")) == ("blocked", "unknown")
        assert effects.record(a, first, "e1", attempt, "success", receipt="r-1") == "success"


def test_f12_neither_time_nor_a_decision_without_evidence_settles_an_unknown_effect(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        first = claimed(a).fence
        effects.record(a, first, "e1", begun(a, first), "unknown", reason="timeout")
        age_effect(a)
        for _ in range(3):
            assert claim(b, "worker-a", [CLASS], 9) == [] and effect(b, "state") == "unknown"
        version = effect(b, "version")
        for missing in ("evidence_kind", "evidence_ref"):
            without: dict[str, Any] = NOT_APPLIED | {missing: ""}
            with pytest.raises(EvidenceMissing):
                reconcile(b, "t", "op-1", "e1", version=version, **without)
        assert (show(b), effect(b, "state")) == ("blocked", "unknown")
        assert reconcile(b, "t", "op-1", "e1", version=version, **NOT_APPLIED) == "resolved_not_applied"
        with pytest.raises(NotUnknown):
            reconcile(a, "t", "op-1", "e1", version=version, **NOT_APPLIED)


def test_f14_a_check_of_an_earlier_transaction_is_worth_nothing(database18: Database) -> None:
    with two(database18) as (a, manual):
        given(a, "control")
        current = claimed(a, "control").fence
        fence(manual, current)
        save(manual, "control")
        complete(manual, current)
        manual.commit()
        assert results(a, "control") == ["a"]

        given(a)
        first = claimed(a).fence
        fence(manual, first)
        manual.commit()
        expire(a)
        second = claimed(a).fence
        save(manual, by="stale")
        with pytest.raises(StaleFence):
            complete(manual, first)
        manual.rollback()
        write(second, "successor")(a)
        assert results(a) == ["successor"]


def test_f15_a_superseded_worker_does_not_renew_its_successors_lease(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        first = claimed(a).fence
        renew(a, first)
        expire(a)
        second = claimed(b).fence
        lease = column(a, "lease_until")
        with pytest.raises(StaleFence):
            renew(a, first)
        assert column(a, "lease_until") == lease
        renew(b, second)


def test_f17_a_job_with_an_open_effect_is_not_completed(database18: Database) -> None:
    with two(database18) as (a, manual):
        given(a)
        current = claimed(a).fence
        fence(manual, current)
        manual.rollback()
        attempt = begun(a, current)
        for act in (fence, complete):
            with pytest.raises(EffectOpen):
                act(manual, current)
            manual.rollback()
        assert show(a) == "running" and results(a) == []
        effects.record(a, current, "e1", attempt, "success", receipt="r-1")
        write(current, "a")(a)
        assert results(a) == ["a"]


def test_f22_a_projector_begins_nothing_whatever_it_knows(databases18: Databases) -> None:
    with (
        separated(databases18) as roles,
        roles.database.connect(autocommit=True) as owner,
        roles.login("executor").connect(autocommit=True) as a,
        roles.login("projector").connect(autocommit=True) as b,
    ):
        given(owner)
        current = claimed(a).fence
        acts: list[Callable[[Conn], object]] = [
            lambda conn: claim(conn, "worker-a", [CLASS], 1),
            lambda conn: again(conn, current),
            lambda conn: effects.record(conn, current, "e1", attempt, "success", receipt="r-1"),
            lambda conn: fail(conn, current, "handler_raised"),
        ]
        attempt = begun(a, current)
        for act in acts:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                act(b)
        assert (show(owner), effect(owner, "state")) == ("running", "pending")
        assert effects.record(a, current, "e1", attempt, "success", receipt="r-1") == "success"


def test_f24_a_job_whose_worker_died_after_the_success_is_finished_by_another(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a, max_attempts=1)
        first = claimed(a).fence
        effects.record(a, first, "e1", begun(a, first), "success", receipt="r-1")
        expire(a)
        second = claimed(b)
        assert second.mode == "finish"
        with pytest.raises(StaleFence):
            write(first, "a")(a)
        write(second.fence, "b")(b)
        assert results(a) == ["b"]


def test_f29_the_same_operation_with_another_meaning_changes_nothing(database18: Database) -> None:
    with two(database18) as (a, manual):
        given(a)
        assert not submit(manual, CLASS, tenant="t", operation="op-1", args={"n": 1})
        manual.commit()
        with pytest.raises(OperationConflict):
            submit(manual, CLASS, tenant="t", operation="op-1", args={"n": 2})
        manual.rollback()
        assert claimed(a).args == b'{"n":1}'


def test_f34_a_receipt_on_record_is_overruled_by_no_worker(database18: Database) -> None:
    with workers(database18) as (a, b):
        given(a)
        first = claimed(a).fence
        earlier = begun(a, first)
        assert effects.record(a, first, "e1", earlier, "failed_before_dispatch") == "failed_before_dispatch"
        later = begun(a, first)
        expire(a)
        assert claim(b, "worker-a", [CLASS], 9) == []

        # The receipt of an earlier begin: the later one cannot make the effect repeatable any more.
        assert effects.record(a, first, "e1", earlier, "success", receipt="r-1") == "superseded"
        with pytest.raises(StaleEffectAttempt):
            effects.record(a, first, "e1", later, "failed_before_dispatch")
        assert (show(b), effect(b, "state")) == ("blocked", "unknown")
        age_effect(b)
        reconcile(b, "t", "op-1", "e1", version=effect(b, "version"), **NOT_APPLIED)

        # It arrives once more, while a successor would begin again.
        second = claimed(b).fence
        assert effects.record(a, first, "e1", later, "success", receipt="r-2") == "unknown"
        assert (show(b), column(b, "reason"), effect(b, "state")) == ("blocked", "effect_contradicted", "unknown")
        with pytest.raises(StaleFence):
            again(b, second)

        given(a, "op-2")
        third = claimed(a, "op-2").fence
        earlier = begun(a, third)
        effects.record(a, third, "e1", earlier, "failed_before_dispatch")
        effects.record(a, third, "e1", begun(a, third), "failed_before_dispatch")
        assert effects.record(b, third, "e1", earlier, "success", receipt="r-3") == "unknown"
        with pytest.raises(StaleFence):
            again(a, third)
        assert (show(b, "op-2"), effect(b, "receipt", "op-2")) == ("blocked", "r-3")


def test_f35_settling_an_effect_gives_no_attempt_beyond_the_budget(database18: Database) -> None:
    with workers(database18) as (a, b):
        classes = {"control": "report.control", "op-1": CLASS}
        for operation, budget in (("control", 2), ("op-1", 1)):
            given(a, operation, job_class=classes[operation], max_attempts=budget)
            first = claimed(a, operation, job_class=classes[operation]).fence
            attempt = begun(a, first)
            expire(a, operation)
            assert claim(b, "worker-a", [classes[operation]], 9) == []
            effects.record(a, first, "e1", attempt, "failed_before_dispatch")
        assert show(b, "control", job_class=classes["control"]) == "queued"
        assert (show(b), column(b, "reason")) == ("poison", "attempts_exhausted")
        assert claim(b, "worker-a", [CLASS], 9) == []
        requeue(b, "t", "op-1", CLASS, **BY)
        claimed(b)
