"""The agenda has one pointer to the lease of a running job, whatever happened before, and looks at no other job by it."""

from __future__ import annotations

from typing import Any

from fencepost.jobs.claim import claim
from fencepost.jobs.renew import renew
from support.database import Database
from support.jobs import CLASS, Conn, claimed, expire, given, show

OTHER = "z.class"


def pointers(conn: Conn) -> list[tuple[Any, ...]]:
    """Every pointer to a lease."""
    return conn.execute(
        "SELECT tenant, operation, class, generation FROM fencepost.agenda WHERE priority = 2147483647 ORDER BY 1, 2, 3, 4"
    ).fetchall()


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
