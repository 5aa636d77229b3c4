"""Fairness: the tenants of a fair class are served in turn, whatever one of them has queued, and nothing is lost by it."""

from collections import Counter
from typing import Any

import pytest

from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import JobClassPolicy, claim, marks, register_class
from fencepost.jobs.fence import complete
from fencepost.jobs.submit import submit
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import CLASS, Conn, given, two
from support.processes import wait_for

BACKLOG = """
INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, priority, run_at)
SELECT %(tenant)s, 'queued-' || n, j.class, j.args, j.meaning, j.digest, j.epoch, j.epoch, %(priority)s, j.run_at + %(later)s::interval
FROM generate_series(1, %(count)s) AS n, (SELECT * FROM fencepost.job WHERE class = %(class)s AND operation = 'seed') AS j"""


def backlog(conn: Conn, tenant: str, count: int, *, priority: int = 0, later: str = "0") -> None:
    """So many queued jobs of one tenant, made from one that is there."""
    values = {"tenant": tenant, "count": count, "priority": priority, "later": later, "class": CLASS}
    conn.execute(BACKLOG, values)


def seeded(conn: Conn, **policy: Any) -> None:
    """A class that is fair, and no work."""
    given(conn, "seed", tenant="seed", **dict[str, Any]({"fair": True} | policy))
    complete(conn, claim(conn, "w", [CLASS], 1)[0].fence)


def tenants(conn: Conn, limit: int, hint: str | None = None) -> list[str]:
    """Whose jobs a claim gets."""
    return [str(job.tenant) for job in claim(conn, "w", [CLASS], limit, hint)]


def test_one_tenants_flood_delays_anothers_single_job_by_no_more_than_a_claim(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "seed", tenant="seed")
        complete(conn, claim(conn, "w", [CLASS], 1)[0].fence)
        backlog(conn, "flood", 3000)
        backlog(conn, "small", 1)
        with conn.transaction(force_rollback=True):
            assert set(tenants(conn, 10)) == {"flood"}, "the control: a class that is not fair"
        register_class(conn, JobClassPolicy(as_class(CLASS), fair=True))
        assert Counter(tenants(conn, 10)) == {"flood": 9, "small": 1}
        backlog(conn, "late", 1)
        assert Counter(tenants(conn, 2)) == {"flood": 1, "late": 1}
        assert tenants(conn, 3) == ["flood"] * 3


def test_tenants_are_served_in_turn_from_claim_to_claim(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        for tenant, count in (("a", 5), ("b", 5), ("c", 1)):
            backlog(conn, tenant, count)
        assert [tenants(conn, 1) for _ in range(6)] == [["a"], ["b"], ["c"], ["a"], ["b"], ["a"]]
        assert Counter(tenants(conn, 3)) in ({"a": 2, "b": 1}, {"a": 1, "b": 2})
        assert sorted(tenants(conn, 100)) in (["a", "b"], ["b", "b"], ["a", "a"])
        assert tenants(conn, 100) == []


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_every_job_is_claimed_once_and_in_equal_parts_as_long_as_all_have_some(
    database18: Database, limit: int
) -> None:
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        counts = {"a": 30, "b": 10, "c": 10, "d": 10}
        for tenant, count in counts.items():
            backlog(conn, tenant, count)
        taken: list[str] = []
        while got := tenants(conn, limit):
            taken += got
        assert Counter(taken) == counts
        first = Counter(taken[:40])
        assert max(first.values()) - min(first.values()) <= limit // 4 + 1, first


def test_what_is_more_urgent_goes_first_whose_ever_it_is(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        backlog(conn, "a", 3)
        backlog(conn, "b", 3, priority=9)
        backlog(conn, "c", 1, priority=-1)
        assert tenants(conn, 2) == ["b", "b"]
        assert tenants(conn, 3) == ["b", "a", "a"]
        assert tenants(conn, 3) == ["a", "c"]


def blocks(conn: Conn) -> int:
    """The blocks that a claim of four touches, plans apart; it is taken back."""
    found: list[int] = []
    for _ in range(3):
        with conn.transaction(force_rollback=True):
            row = conn.execute(
                "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM fencepost.claim('w', %(c)s, 4)",
                {"c": [CLASS]},
            ).fetchone()
        assert row is not None
        plan: dict[str, int] = row[0][0]["Plan"]
        found.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    return min(found)


def test_a_fair_claim_costs_what_it_takes_and_not_the_backlog(database: Database) -> None:
    touched: list[int] = []
    with database.connect(autocommit=True) as conn:
        seeded(conn, tenant_limit=3)
        for number, count in enumerate((1_000, 19_000)):
            backlog(conn, f"flood-{number}", count)
            backlog(conn, f"small-{number}", 1)
            touched.append(blocks(conn))
    assert touched[1] < touched[0] * 1.5 + 100 and touched[1] < 1_500, touched


def test_what_a_transaction_submits_across_the_change_to_fair_is_not_lost(database18: Database) -> None:
    with two(database18) as (auto, manual):
        seeded(auto, fair=False)
        submit(manual, CLASS, tenant="across", operation="op", args={"n": 1})
        backlog(auto, "before", 2)
        register_class(auto, JobClassPolicy(as_class(CLASS), fair=True))
        assert tenants(auto, 2) == ["before", "before"]
        manual.commit()
        unmarked = "SELECT tenant FROM fencepost.agenda WHERE fair_class IS NULL AND priority < 2147483646"
        assert auto.execute(unmarked).fetchall() == [("across",)]
        # A claim that has room left looks for it, and the next one takes it.
        assert [*tenants(auto, 1), *tenants(auto, 1)] == ["across"]


def test_it_is_found_under_a_flood_too(database18: Database) -> None:
    """Claims that are always full have no time to look for it; the hint has."""
    with two(database18) as (auto, manual):
        seeded(auto, fair=False)
        submit(manual, CLASS, tenant="across", operation="op", args={"n": 1})
        register_class(auto, JobClassPolicy(as_class(CLASS), fair=True))
        backlog(auto, "flood", 200)
        manual.commit()
        assert tenants(auto, 2) == ["flood", "flood"]
        noted = marks(auto, [CLASS])

        def further() -> str | None:
            found = marks(auto, [CLASS], noted)
            return None if found == noted else found

        hint = wait_for(further, 30, "every earlier writer to end")
        assert "across" in [*tenants(auto, 2, hint), *tenants(auto, 2, hint)]


def test_no_more_fair_is_the_plain_order_again(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        backlog(conn, "b", 3)
        backlog(conn, "a", 3)
        assert tenants(conn, 2) == ["a", "b"]
        register_class(conn, JobClassPolicy(as_class(CLASS)))
        assert tenants(conn, 4) == ["b", "b", "a", "a"]


def test_tenants_with_work_for_later_only_do_not_hide_one_with_due_work(database18: Database) -> None:
    """A claim looks at a thousand tenants, and the next one goes on from there."""
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        conn.execute(
            "INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, run_at)"
            " SELECT 'later-' || n, 'op', j.class, j.args, j.meaning, j.digest, j.epoch, j.epoch, now() + interval '1 h'"
            " FROM generate_series(1, 2500) AS n, (SELECT * FROM fencepost.job WHERE operation = 'seed') AS j"
        )
        backlog(conn, "now", 3)
        assert [tenants(conn, 1) for _ in range(3)] == [[], [], ["now"]]


def test_a_tenant_whose_due_jobs_were_all_cancelled_holds_up_nobody(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        backlog(conn, "gone", 20)
        backlog(conn, "here", 4)
        for number in range(1, 21):
            cancel(conn, "gone", f"queued-{number}", CLASS, actor="ann", reason="no more")
        assert tenants(conn, 2) == ["here", "here"]
        assert tenants(conn, 4) == ["here", "here"]
        assert conn.execute("SELECT count(*) FROM fencepost.agenda WHERE tenant = 'gone'").fetchone() == (0,)


def test_work_of_a_tenant_that_is_held_under_an_old_epoch_holds_up_nobody(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        seeded(conn)
        backlog(conn, "held", 20)
        backlog(conn, "here", 4)
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('held', 2)")
        assert tenants(conn, 4) == ["here"] * 4
        conn.execute("UPDATE fencepost.job SET epoch = 2 WHERE tenant = 'held' AND operation = 'queued-7'")
        assert tenants(conn, 4) == ["held"]
