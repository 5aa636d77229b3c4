"""The agenda has one pointer to the lease of a running job, whatever happened before, and looks at no other job by it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, LiteralString

from fencepost.jobs.claim import claim
from fencepost.jobs.renew import renew
from support.database import Database
from support.jobs import CLASS, Background, Conn, claimed, expire, given, show, two, waiting

OTHER = "z.class"
# Fires while a claim looks at leases, and holds it there until the test lets go of the lock.
PAUSED: LiteralString = """
CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock(77); RETURN OLD; END $$;
CREATE TRIGGER hold_up BEFORE DELETE ON fencepost.agenda FOR EACH ROW WHEN (OLD.operation = 'stale') EXECUTE FUNCTION hold_up()"""
# Holds a claim that writes the pointer of op-1 until the lease of op-2 is over.
SLOW: LiteralString = """
CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WHILE clock_timestamp() <= (SELECT lease_until FROM fencepost.job WHERE operation = 'op-2') LOOP
        PERFORM pg_sleep(0.01);
    END LOOP;
    RETURN NEW;
END $$;
CREATE TRIGGER hold_up BEFORE INSERT ON fencepost.agenda FOR EACH ROW WHEN (NEW.operation = 'op-1') EXECUTE FUNCTION hold_up()"""
ENDED: LiteralString = """
UPDATE fencepost.job SET exec = 'cancelled', attempt = NULL, owner = NULL, lease_until = NULL WHERE operation = 'stale'"""


def pointers(conn: Conn) -> list[tuple[Any, ...]]:
    """Every pointer to a lease."""
    return conn.execute(
        "SELECT tenant, operation, class, generation FROM fencepost.agenda WHERE priority = 2147483647 ORDER BY 1, 2, 3, 4"
    ).fetchall()


@contextmanager
def held_up(conn: Conn, trigger: LiteralString) -> Generator[None]:
    """With this trigger on the agenda, which goes again whatever happens: later tests may be given the same database."""
    conn.execute(trigger)
    try:
        yield
    finally:
        conn.execute("DROP FUNCTION hold_up CASCADE")


def all_due(conn: Conn) -> None:
    """Every pointer to a lease is to be looked at now; the leases themselves are as they were."""
    conn.execute("UPDATE fencepost.agenda SET due = clock_timestamp() - interval '1 s' WHERE priority = 2147483647")


def test_a_job_that_runs_again_has_one_pointer_to_its_newest_claim(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        claimed(conn)
        assert pointers(conn) == [("t", "op-1", CLASS, 1)]
        expire(conn)
        second = claimed(conn)
        for _ in range(3):
            all_due(conn)
            assert claim(conn, "w", [CLASS], 10) == []
        assert pointers(conn) == [("t", "op-1", CLASS, second.fence.generation)]
        renew(conn, second.fence)
        assert show(conn) == "running"


def test_a_lease_is_judged_by_its_own_job_and_by_no_namesake(database18: Database) -> None:
    """Same operation in two tenants and two classes, same tenant with two operations; one lease of the four is over."""
    with database18.connect(autocommit=True) as conn:
        for tenant, operation, job_class in (
            ("t", "a", CLASS),
            ("u", "a", CLASS),
            ("t", "b", CLASS),
            ("t", "a", OTHER),
        ):
            given(conn, operation, tenant=tenant, job_class=job_class)
        assert len(claim(conn, "w", [CLASS, OTHER], 10)) == 4
        conn.execute(
            "UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 s', run_at = clock_timestamp() + interval '1 h'"
            " WHERE tenant = 't' AND operation = 'a' AND class = %(class)s",
            {"class": CLASS},
        )
        all_due(conn)
        taken = claim(conn, "w", [CLASS, OTHER], 10)
        assert [(job.tenant, job.operation, job.job_class) for job in taken] == [("t", "a", CLASS)]
        all_due(conn)
        assert claim(conn, "w", [CLASS, OTHER], 10) == []
        running = conn.execute(
            "SELECT tenant, operation, class, generation FROM fencepost.job WHERE exec = 'running' ORDER BY 1, 2, 3, 4"
        ).fetchall()
        assert pointers(conn) == running and len(running) == 4


def test_a_claim_takes_back_no_lease_of_a_namesake_in_a_class_that_it_was_not_asked_for(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for job_class in (CLASS, OTHER):
            given(conn, job_class=job_class)
        assert len(claim(conn, "w", [CLASS, OTHER], 10)) == 2
        conn.execute("UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 ms'")
        assert [job.job_class for job in claim(conn, "w", [CLASS], 10)] == [CLASS]
        assert show(conn, job_class=OTHER) == "running"
        assert [job.job_class for job in claim(conn, "w", [OTHER], 10)] == [OTHER]


def test_a_done_job_has_no_pointer_once_it_was_looked_at(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "op-2")
        claimed(conn)
        conn.execute(
            "UPDATE fencepost.job SET exec = 'cancelled', attempt = NULL, owner = NULL, lease_until = NULL"
            " WHERE operation = 'op-1'"
        )
        all_due(conn)
        claim(conn, "w", [CLASS], 10)
        assert [row[1] for row in pointers(conn)] == ["op-2"]


def test_an_expired_job_that_somebody_holds_is_found_by_a_later_claim(database18: Database) -> None:
    with two(database18) as (conn, holder):
        given(conn)
        given(conn, "op-2")
        assert len(claim(conn, "w", [CLASS], 10)) == 2
        expire(conn)
        expire(conn, "op-2")
        holder.execute("SELECT FROM fencepost.job WHERE operation = 'op-1' FOR UPDATE")
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["op-2"]
        holder.rollback()
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["op-1"]


def test_claims_that_look_at_the_same_leases_do_not_wait_for_each_other(database18: Database) -> None:
    with two(database18) as (conn, first):
        for operation in ("expired", "renewed", "stale"):
            given(conn, operation)
        assert len(claim(conn, "w", [CLASS], 10)) == 3
        conn.execute(ENDED)
        expire(conn, "expired")
        all_due(conn)
        assert [job.operation for job in claim(first, "w", [CLASS], 10)] == ["expired"]
        conn.execute("SET lock_timeout = '5s'")
        assert claim(conn, "w", [CLASS], 10) == []
        first.rollback()
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["expired"]
        assert {row[1] for row in pointers(conn)} == {"expired", "renewed"}


def test_of_namesakes_whose_leases_are_over_each_is_left_once(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        every = [("t", "a", CLASS), ("u", "a", CLASS), ("t", "b", CLASS), ("t", "a", OTHER)]
        for tenant, operation, job_class in every:
            given(conn, operation, tenant=tenant, job_class=job_class)
        assert len(claim(conn, "w", [CLASS, OTHER], 10)) == 4
        conn.execute("UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 s'")
        taken = claim(conn, "w", [CLASS, OTHER], 10)
        assert sorted((job.tenant, job.operation, job.job_class) for job in taken) == sorted(every)
        assert {job.fence.generation for job in taken} == {3}


def test_a_lease_that_became_longer_while_a_claim_looked_is_left_alone(database18: Database) -> None:
    with two(database18) as (conn, gate):
        for operation in ("stale", "op-1", "op-2"):
            given(conn, operation)
        assert len(claim(conn, "w", [CLASS], 10)) == 3
        conn.execute(ENDED)
        expire(conn)
        expire(conn, "op-2")
        all_due(conn)
        with held_up(conn, PAUSED):
            gate.execute("SELECT pg_advisory_xact_lock(77)")
            claiming = Background(database18, lambda c: claim(c, "w", [CLASS], 10))
            try:
                waiting(conn, claiming.pid)
                conn.execute(
                    "UPDATE fencepost.job SET lease_until = clock_timestamp() + interval '1 h' WHERE operation = 'op-1'"
                )
            finally:
                gate.rollback()
            assert [job.operation for job in claiming.outcome()] == ["op-2"]
        assert show(conn) == "running"


def test_a_lease_that_ends_while_a_claim_looks_is_due_no_earlier_than_it_was_written(database18: Database) -> None:
    """Behind the marks nobody would look for it."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "op-2")
        assert len(claim(conn, "w", [CLASS], 10)) == 2
        all_due(conn)
        conn.execute("UPDATE fencepost.agenda SET due = due - interval '1 s' WHERE operation = 'op-1'")
        with held_up(conn, SLOW):
            conn.execute(
                "UPDATE fencepost.job SET lease_until = clock_timestamp() + interval '8 s' WHERE operation = 'op-2'; "
                "DELETE FROM fencepost.agenda WHERE operation = 'op-2' AND due > clock_timestamp()"
            )
            assert claim(conn, "w", [CLASS], 10) == []
        found = conn.execute(
            "SELECT a.operation, a.due = j.lease_until, a.due > j.lease_until FROM fencepost.agenda AS a"
            " JOIN fencepost.job AS j USING (tenant, operation, class) ORDER BY 1"
        ).fetchall()
        assert found == [("op-1", True, False), ("op-2", False, True)]
