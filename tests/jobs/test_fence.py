"""Only the current fence renews, publishes, begins and finishes: every part of it, by PostgreSQL, under lock (G8)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import psycopg.sql
import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import claim
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.publish import publish
from fencepost.jobs.renew import renew
from fencepost.jobs.stage import stage
from fencepost.schemas.errors import EffectOpen, NotArmed, StaleFence
from fencepost.schemas.identity import Attempt, Epoch, Generation, OperationId, Owner, Tenant
from support.database import Database
from support.jobs import (
    Background,
    Conn,
    again,
    begun,
    claimed,
    column,
    expire,
    given,
    results,
    save,
    show,
    two,
    waiting,
)

Act = Callable[[Conn, Fence], object]


def _begin(conn: Conn, f: Fence) -> object:
    return again(conn, f)


def _fail(conn: Conn, f: Fence) -> object:
    return fail(conn, f, "handler_raised")


def _publish(conn: Conn, f: Fence) -> object:
    return publish(conn, f, lambda tx: save(tx, f.operation))


ACTS: list[Act] = [renew, fence, complete, _begin, _fail, release, _publish]
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("generation", {"generation": Generation(7)}),
    ("attempt", {"attempt": Attempt(uuid4())}),
    ("owner", {"owner": Owner("worker-b")}),
    ("epoch", {"epoch": Epoch(2)}),
    ("operation", {"tenant": Tenant("other")}),
    ("operation", {"operation": OperationId("other")}),
]


def each(conn: Conn) -> Iterator[tuple[Act, Fence]]:
    """Every act that needs the fence, each with a current claim of a job of its own."""
    for act in ACTS:
        given(conn, act.__name__)
        yield act, claimed(conn, act.__name__, owner="worker").fence


def test_every_stale_part_is_refused_by_name_and_the_current_fence_is_not(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for act, current in each(conn):
            for part, changes in PARTS:
                with pytest.raises(StaleFence) as refused:
                    act(conn, replace(current, **changes))
                assert refused.value.field == part
                assert show(conn, current.operation) == "running" and results(conn, current.operation) == []
            act(conn, current)


def test_an_expired_lease_is_refused_even_if_nobody_took_over(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for act, current in each(conn):
            renew(conn, current)
            expire(conn, current.operation)
            with pytest.raises(StaleFence) as refused:
                act(conn, current)
            assert refused.value.field == "lease"
            assert results(conn, current.operation) == []


def test_a_superseded_attempt_is_refused_although_its_owner_has_the_same_name(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for act, first in each(conn):
            operation = first.operation
            expire(conn, operation)
            second = claimed(conn, operation, owner="worker").fence
            assert second.generation > first.generation and second.attempt != first.attempt
            with pytest.raises(StaleFence) as refused:
                act(conn, first)
            assert refused.value.field == "generation"
            publish(conn, second, partial(save, operation=operation, by="second"))
            assert results(conn, operation) == ["second"]


def test_after_an_accepted_cancel_nothing_is_allowed(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for act, current in each(conn):
            renew(conn, current)
            operation = current.operation
            assert cancel(conn, "t", operation, current.job_class, actor="tester", reason="no more") == "cancelled"
            with pytest.raises(StaleFence) as refused:
                act(conn, current)
            assert refused.value.field == "state"
            assert show(conn, operation) == "cancelled" and results(conn, operation) == []


def test_a_disarmed_database_refuses_everything(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        claims = list(each(conn))
        for _, current in claims:
            renew(conn, current)
        conn.execute("DELETE FROM fencepost.ticket")
        for act, current in claims:
            with pytest.raises(NotArmed):
                act(conn, current)
            assert show(conn, current.operation) == "running" and results(conn, current.operation) == []
        f = claims[0][1]
        others: list[Callable[[], object]] = [
            lambda: claim(conn, "worker", [f.job_class], 1),
            lambda: cancel(conn, f.tenant, f.operation, f.job_class, actor="ann", reason="why"),
            lambda: requeue(conn, f.tenant, f.operation, f.job_class, actor="ann", reason="why"),
            lambda: effects.record(conn, f, "e1", uuid4(), "success", receipt="r-1"),
        ]
        for other in others:
            with pytest.raises(NotArmed):
                other()
        assert stage(conn, f, "needs no authority")


def test_a_tenant_whose_epoch_advanced_refuses_the_old_fence(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        renew(conn, current)
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2)")
        for act in ACTS:
            with pytest.raises(StaleFence) as refused:
                act(conn, current)
            assert refused.value.field == "epoch"


def test_the_commit_is_refused_when_the_client_forgot_the_second_check_and_the_lease_ended(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        first = claimed(auto).fence
        fence(manual, first)
        save(manual, by="in time")
        manual.commit()
        assert results(auto) == ["in time"]

        given(auto, "op-2")
        second = claimed(auto, "op-2").fence
        _short(auto, "op-2", milliseconds=3000)
        fence(manual, second)
        save(manual, "op-2", by="too late")
        manual.execute(
            "SELECT pg_sleep_for(lease_until - clock_timestamp() + interval '5 ms')"
            " FROM fencepost.publication WHERE operation = 'op-2'"
        )
        with pytest.raises(StaleFence) as refused:
            manual.commit()
        assert refused.value.field == "lease"
        assert results(auto, "op-2") == []


def _again(conn: Conn, operation: str) -> Fence:
    expire(conn, operation)
    return claimed(conn, operation).fence


def _short(conn: Conn, operation: str = "op-1", milliseconds: int = 500) -> None:
    conn.execute(
        "UPDATE fencepost.job SET lease_until = clock_timestamp() + %(ms)s * interval '1 ms' WHERE operation = %(o)s",
        {"ms": milliseconds, "o": operation},
    )


def test_the_commit_is_refused_when_the_same_transaction_gave_the_job_away(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        fence(manual, current)
        save(manual)
        cancel(manual, "t", "op-1", current.job_class, actor="tester", reason="in between")
        with pytest.raises(StaleFence) as refused:
            manual.commit()
        assert refused.value.field == "state"
        assert results(auto) == [] and show(auto) == "running"
        publish(auto, current, lambda tx: save(tx, by="control"))
        assert results(auto) == ["control"]


def test_a_lease_that_ends_while_a_begin_waits_for_the_row_is_refused(database: Database) -> None:
    """P4: the clock is read after the lock, in a later statement."""
    with two(database) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        fence(manual, current)
        manual.rollback()

        manual.execute("SELECT FROM fencepost.job FOR NO KEY UPDATE")
        late = Background(database, lambda conn: begun(conn, current))
        waiting(auto, late.pid)
        manual.execute("UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 ms'")
        manual.commit()
        with pytest.raises(StaleFence) as refused:
            late.outcome()
        assert refused.value.field == "lease"

        # The holder only locked the row: what the waiter read before it waited must not count.
        successor = _again(auto, "op-1")
        _short(auto)
        manual.execute("SELECT FROM fencepost.job FOR NO KEY UPDATE")
        late = Background(database, lambda conn: begun(conn, successor))
        waiting(auto, late.pid)
        manual.execute("SELECT pg_sleep(0.6)")
        manual.rollback()
        with pytest.raises(StaleFence) as refused:
            late.outcome()
        assert refused.value.field == "lease"


def test_nobody_supersedes_a_fenced_transaction_until_it_ends(database: Database) -> None:
    """F14: check and write are one transaction."""
    with two(database) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        fence(manual, current)
        save(manual)
        later = Background(
            database, lambda conn: cancel(conn, "t", "op-1", current.job_class, actor="tester", reason="too slow")
        )
        waiting(auto, later.pid)
        complete(manual, current)
        manual.commit()
        assert later.outcome() == "too_late"
        assert results(auto) == ["a"] and show(auto) == "done"


def test_a_savepoint_rolled_back_behind_the_fence_does_not_let_a_stale_attempt_publish(database: Database) -> None:
    """P9: rolling back to before the fence releases the row; the completion then finds the successor's claim."""
    with two(database) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        manual.execute("SAVEPOINT before")
        fence(manual, current)
        manual.execute("ROLLBACK TO SAVEPOINT before")
        save(manual, by="stale")
        expire(auto)
        successor = claimed(auto).fence
        with pytest.raises(StaleFence):
            complete(manual, current)
        manual.rollback()
        publish(auto, successor, lambda tx: save(tx, by="successor"))
        assert results(auto) == ["successor"]


def test_an_open_effect_forbids_fence_and_completion(database: Database) -> None:
    """F17."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        fence(conn, current)
        begun(conn, current)
        for act in (fence, complete, _publish):
            with pytest.raises(EffectOpen):
                act(conn, current)
        assert results(conn) == [] and show(conn) == "running"


def test_a_renewal_extends_the_lease_of_the_current_attempt_only(database: Database) -> None:
    """F15."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        first = claimed(conn).fence
        _short(conn, milliseconds=10_000)
        before = column(conn, "lease_until")
        renew(conn, first)
        assert column(conn, "lease_until") > before
        expire(conn)
        claimed(conn)
        lease = column(conn, "lease_until")
        with pytest.raises(StaleFence):
            renew(conn, first)
        assert column(conn, "lease_until") == lease


def test_a_renewal_does_not_wait_for_a_long_publication(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        renew(auto, current)
        fence(manual, current)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            renew(auto, current)
        manual.rollback()
        renew(auto, current)


def test_what_a_stale_attempt_computed_may_be_staged_but_a_stranger_may_not_stage(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        first = claimed(conn).fence
        expire(conn)
        claimed(conn)
        assert stage(conn, first, {"words": 3.5})
        assert not stage(conn, first, {"words": 4})
        for strange in (replace(first, attempt=Attempt(uuid4())), replace(first, tenant=Tenant("other"))):
            with pytest.raises(StaleFence) as refused:
                stage(conn, strange, {})
            assert refused.value.field == "attempt"


def test_generations_never_go_back_and_history_is_never_changed(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        stage(conn, current, 1)
        with pytest.raises(StaleFence) as refused:
            conn.execute("UPDATE fencepost.job SET generation = generation - 1")
        assert refused.value.field == "generation"
        for table in ("attempt", "staged", "publication", "effect_event", "decision"):
            with pytest.raises(psycopg.Error, match="append-only"):
                conn.execute(psycopg.sql.SQL("DELETE FROM fencepost.{}").format(psycopg.sql.Identifier(table)))
