"""Claims: due work only, each under a new attempt; what expired is taken back only if it still is as it was read."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import Job, claim
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import Fence, complete
from fencepost.jobs.publish import publish
from fencepost.jobs.renew import renew
from fencepost.schemas.errors import EffectOpen, InvalidInput, StaleFence, UnknownJob
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    again,
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
from support.processes import wait_for


def test_a_batch_is_claimed_once_and_each_claim_has_its_own_attempt(database: Database) -> None:
    with two(database) as (auto, manual):
        for number in range(6):
            given(auto, f"op-{number}")
        first = claim(manual, "a", [CLASS], 4)
        second = claim(auto, "b", [CLASS], 4)
        assert len(first) == 4 and len(second) == 2
        assert {job.operation for job in first}.isdisjoint(job.operation for job in second)
        assert len({job.fence.attempt for job in [*first, *second]}) == 6
        assert all(job.attempts == 1 and job.mode == "execute" and job.lease == 30 for job in first)
        manual.rollback()
        assert len(claim(auto, "b", [CLASS], 10)) == 4


def test_higher_priority_and_earlier_due_jobs_go_first(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for name in ("third", "second", "first", "urgent"):
            given(conn, name)
        conn.execute("UPDATE fencepost.job SET run_at = run_at - interval '1 h' WHERE operation = 'first'")
        conn.execute("UPDATE fencepost.job SET run_at = run_at - interval '1 min' WHERE operation = 'second'")
        conn.execute("UPDATE fencepost.job SET priority = 1 WHERE operation = 'urgent'")
        assert [job.operation for job in claim(conn, "a", [CLASS], 10)] == ["urgent", "first", "second", "third"]


def test_of_namesakes_in_two_tenants_the_one_that_waited_longer_goes_first(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for operation, tenants in (("a", ("u", "t")), ("b", ("t", "u"))):
            for tenant in tenants:
                given(conn, operation, tenant=tenant)
            first, second = (claim(conn, "w", [CLASS], 1) for _ in range(2))
            assert [(job.tenant, job.operation) for job in (*first, *second)] == [(each, operation) for each in tenants]


def test_an_old_pointer_to_a_job_that_was_queued_anew_takes_nobodys_place(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "a")
        conn.execute("UPDATE fencepost.job SET generation = generation + 1 WHERE operation = 'a'")
        given(conn, "b")
        assert [job.operation for job in claim(conn, "w", [CLASS], 2)] == ["a", "b"]


def test_what_was_cancelled_or_made_less_urgent_takes_nobodys_place(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for operation in ("cancelled", "demoted", "control"):
            given(conn, operation)
        conn.execute("UPDATE fencepost.job SET priority = 5 WHERE operation = 'demoted'")
        conn.execute("UPDATE fencepost.job SET priority = 0 WHERE operation = 'demoted'")
        conn.execute("UPDATE fencepost.job SET priority = 3 WHERE operation = 'control'")
        cancel(conn, "t", "cancelled", CLASS, actor="ann", reason="no more")
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["control"]
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["demoted"]


def test_a_queued_job_with_an_open_effect_takes_nobodys_place(database18: Database) -> None:
    """No transition leaves one in the queue: as after somebody wrote to the tables himself."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "op-2")
        conn.execute("UPDATE fencepost.job SET open_effects = 1 WHERE operation = 'op-1'")
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["op-2"]
        conn.execute("UPDATE fencepost.job SET open_effects = 0")
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["op-1"]


def test_attempts_count_at_the_claim_and_their_end_is_poison_until_an_operator_decides(database: Database) -> None:
    """B06, without a process: nobody ever reports the failure."""
    with database.connect(autocommit=True) as conn:
        given(conn, max_attempts=3)
        for number in (1, 2, 3):
            assert claimed(conn).attempts == number
            expire(conn)
        assert claim(conn, "w", [CLASS], 10) == []
        assert (show(conn), column(conn, "reason"), column(conn, "detail")) == (
            "poison",
            "attempts_exhausted",
            "lease_expired",
        )
        with pytest.raises(UnknownJob):
            requeue(conn, "other", "op-1", CLASS, actor="ann", reason="fixed")
        requeue(conn, "t", "op-1", CLASS, actor="ann", reason="fixed")
        job = claimed(conn)
        assert job.attempts == 1
        publish(conn, job.fence, lambda tx: save(tx))
        assert show(conn) == "done"
        assert conn.execute("SELECT kind, actor, reason FROM fencepost.decision").fetchall() == [
            ("requeue", "ann", "fixed")
        ]


def test_failures_retry_with_backoff_until_poison_and_a_final_one_is_poison_at_once(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, max_attempts=2, backoff_base=60.0, backoff_max=3600.0)
        assert fail(conn, claimed(conn).fence, "handler_raised", detail="ValueError") == "queued"
        row = conn.execute("SELECT run_at - clock_timestamp() BETWEEN '20 s' AND '60 s' FROM fencepost.job").fetchone()
        assert row == (True,)
        assert claim(conn, "w", [CLASS], 1) == []
        assert (column(conn, "reason"), column(conn, "detail")) == ("handler_raised", "ValueError")
        conn.execute("UPDATE fencepost.job SET run_at = clock_timestamp()")
        assert fail(conn, claimed(conn).fence, "handler_raised", detail="ValueError") == "poison"
        assert (column(conn, "reason"), column(conn, "detail")) == ("attempts_exhausted", "handler_raised: ValueError")

        given(conn, "op-2", max_attempts=2)
        assert fail(conn, claimed(conn, "op-2").fence, "unusable", final=True) == "poison"
        given(conn, "op-3")
        with pytest.raises(InvalidInput) as refused:
            fail(conn, claimed(conn, "op-3").fence, "Not a code!")
        assert refused.value.field == "reason"


def test_a_released_claim_is_not_charged(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, max_attempts=1)
        for _ in range(3):
            job = claimed(conn)
            assert job.attempts == 1
            assert release(conn, job.fence) == "queued"
        assert fail(conn, claimed(conn).fence, "handler_raised") == "poison"


def test_requeue_is_for_poison_and_cancelled_jobs_without_open_effects(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        with pytest.raises(StaleFence) as refused:
            requeue(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        assert refused.value.field == "state"
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        cancel(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        with pytest.raises(EffectOpen):
            requeue(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        effects.record(conn, job.fence, "e1", attempt, "failed_before_dispatch", reason="not_dispatched")
        requeue(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        assert claimed(conn).attempts == 1


def test_work_under_an_older_epoch_is_held(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "other", tenant="u")
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2)")
        assert [job.tenant for job in claim(conn, "w", [CLASS], 10)] == ["u"]
        assert show(conn) == "queued"


def test_a_queued_job_of_another_generation_is_pointed_to_anew(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        conn.execute("UPDATE fencepost.job SET generation = generation + 1")
        assert [(job.operation, job.fence.generation) for job in claim(conn, "w", [CLASS], 1)] == [("op-1", 2)]


def test_a_job_that_comes_back_to_the_queue_as_it_was_is_pointed_to_anew(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        conn.execute("UPDATE fencepost.job SET exec = 'held'")
        conn.execute("DELETE FROM fencepost.agenda")
        assert claim(conn, "w", [CLASS], 1) == []
        conn.execute("UPDATE fencepost.job SET exec = 'queued'")
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["op-1"]


def test_pointers_are_made_for_what_is_queued_and_where_it_would_be_found_otherwise(database18: Database) -> None:
    pointers = "SELECT priority, epoch FROM fencepost.agenda ORDER BY 1, 2"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        conn.execute("UPDATE fencepost.job SET detail = 'looked at'")
        assert conn.execute(pointers).fetchall() == [(0, 1)]
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2)")
        conn.execute("UPDATE fencepost.job SET epoch = 2")
        assert conn.execute(pointers).fetchall() == [(0, 1), (0, 2)]
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["op-1"]
        conn.execute("DELETE FROM fencepost.agenda")
        conn.execute(
            "INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, run_at, exec)"
            " SELECT tenant, 'op-2', class, args, meaning, digest, accepted_epoch, epoch, run_at, 'held' FROM fencepost.job"
        )
        assert conn.execute(pointers).fetchall() == []


def test_a_pointer_gives_a_job_of_an_older_epoch_no_claim(database18: Database) -> None:
    """As after somebody wrote to the tables himself: the job's own epoch decides."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2)")
        conn.execute("UPDATE fencepost.agenda SET epoch = 2")
        assert claim(conn, "w", [CLASS], 1) == []
        conn.execute("UPDATE fencepost.job SET epoch = 2")
        assert [job.operation for job in claim(conn, "w", [CLASS], 1)] == ["op-1"]


def test_held_work_of_an_older_epoch_does_not_hold_up_what_is_behind_it(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "behind", tenant="u")
        backlog(conn, 300, priority=9)
        assert {job.tenant for job in claim(conn, "w", [CLASS], 1)} == {"t"}
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2)")
        assert [job.operation for job in claim(conn, "w", [CLASS], 4)] == ["behind"]
        conn.execute("UPDATE fencepost.job SET epoch = 2 WHERE operation = 'queued-7'")
        assert [job.operation for job in claim(conn, "w", [CLASS], 4)] == ["queued-7"]


def test_the_floor_holds_work_of_every_tenant_without_a_row(database: Database) -> None:
    with database.connect() as conn:
        conn.autocommit = True
        given(conn, "old")
        given(conn, "new", tenant="u")
        conn.autocommit = False
        conn.execute("UPDATE fencepost.installation SET epoch_counter = 2, floor = 2")
        conn.execute("UPDATE fencepost.job SET epoch = 2 WHERE operation = 'new'")
        assert [job.operation for job in claim(conn, "w", [CLASS], 4)] == ["new"]
        conn.rollback()


def test_several_classes_share_one_order_and_leave_the_rest_to_others(database: Database) -> None:
    with two(database) as (auto, manual):
        names = ("a.a", "a.b", "a.c")
        for priority, job_class in enumerate([*names, *reversed(names)]):
            given(auto, f"op-{priority}", job_class=job_class)
            auto.execute(
                "UPDATE fencepost.job SET priority = %(p)s WHERE operation = %(o)s",
                {"p": priority, "o": f"op-{priority}"},
            )
        first = [job.operation for job in claim(manual, "a", [*names, "a.a"], 2)]
        rest = [job.operation for job in claim(auto, "b", names, 100)]
        assert first == ["op-5", "op-4"]
        # What the first claim looked at beyond its share it does not hold.
        assert rest == ["op-3", "op-2", "op-1", "op-0"]


def test_what_a_class_leaves_of_its_part_goes_to_another_whose_own_part_is_taken(database: Database) -> None:
    with two(database) as (auto, manual):
        for n in range(2):
            given(auto, f"held-{n}", job_class="a.held")
        for n in range(6):
            given(auto, f"free-{n}", job_class="b.free")
        # Somebody else is at every job of the first class: its part of the claim is of no use to it.
        manual.execute("SELECT FROM fencepost.job WHERE class = 'a.held' FOR NO KEY UPDATE")
        found = [job.operation for job in claim(auto, "w", ["a.held", "b.free"], 4)]
        assert found == [f"free-{n}" for n in range(4)]
        # The control: what nobody is at any more is claimed.
        manual.rollback()
        assert [job.operation for job in claim(auto, "w", ["a.held", "b.free"], 2)] == ["held-0", "held-1"]


@pytest.mark.parametrize("planned", ["fresh", "before the backlog"])
def test_a_claim_costs_what_it_takes_and_not_the_backlog(database: Database, planned: str) -> None:
    """Counted in blocks, of the whole call; also for a session whose plans are older than the backlog."""
    touched: list[int] = []
    with database.connect(autocommit=True) as conn:
        # What earlier tests left behind in this database is not what is counted.
        conn.execute("VACUUM fencepost.job, fencepost.agenda, fencepost.effect, fencepost.attempt, fencepost.tenant")
        given(conn, "seed")
        given(conn, "seed", job_class="another.class")
        for total in (1_000, 20_000):
            with database.connect(autocommit=True) as session:
                for _ in range(8):
                    blocks(session)
                if planned == "fresh":
                    conn.execute("VACUUM ANALYZE fencepost.job, fencepost.agenda")
                backlog(conn, total)
                if planned == "fresh":
                    conn.execute("VACUUM ANALYZE fencepost.job, fencepost.agenda")
                blocks(session)
                # An ANALYZE between two looks makes one of them plan again.
                touched.append(min(blocks(session) for _ in range(3)))
    assert touched[1] < touched[0] * 1.5 + 50 and touched[1] < 1_000, touched


def blocks(conn: Conn) -> int:
    """The blocks that a claim of four touches; it is taken back."""
    with conn.transaction(force_rollback=True):
        row = conn.execute(
            "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM fencepost.claim('w', %(c)s, 4)",
            {"c": [CLASS, "another.class"]},
        ).fetchone()
    assert row is not None
    plan: dict[str, int] = row[0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def backlog(conn: Conn, total: int, *, priority: int = 0) -> None:
    """So many queued jobs of the class, made from one that is there; no statistics are gathered."""
    conn.execute(
        "INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, priority, run_at)"
        " SELECT 't', 'queued-' || n, j.class, j.args, j.meaning, j.digest, 1, 1, %(priority)s, j.run_at"
        " FROM generate_series(1, %(total)s) AS n,"
        " (SELECT * FROM fencepost.job WHERE class = %(class)s AND operation NOT LIKE 'queued-%%' LIMIT 1) AS j"
        " ON CONFLICT DO NOTHING",
        {"total": total, "class": CLASS, "priority": priority},
    )


def test_an_unknown_or_pending_effect_excludes_every_claim(database: Database) -> None:
    """F4 and F6: neither a claim nor the reaper makes it runnable."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        expire(conn)
        assert claim(conn, "w", [CLASS], 10) == []
        assert (show(conn), column(conn, "reason"), effect(conn, "state")) == ("blocked", "effect_unknown", "unknown")
        conn.execute("UPDATE fencepost.job SET exec = 'queued', run_at = clock_timestamp()")
        assert claim(conn, "w", [CLASS], 10) == [], "the count of open effects alone excludes a claim"
        effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-1")
        finish = claimed(conn)
        assert finish.mode == "finish" and again(conn, finish.fence) == effects.Recorded("r-1", None)


def test_the_reaper_takes_only_what_is_still_expired_when_it_holds_the_row(database: Database) -> None:
    """B17: what happened while the reaper waited for the gate stands: done, claimed anew, cancelled, begun."""
    with two(database) as (auto, manual):
        acts: dict[str, Callable[[Fence], object]] = {
            "complete": lambda f: complete(auto, f),
            "renew": lambda f: renew(auto, f),
            "cancel": lambda f: cancel(auto, "t", f.operation, CLASS, actor="ann", reason="why"),
            "begin": lambda f: begun(auto, f),
        }
        claims: dict[str, Job] = {}
        for name in acts:
            given(auto, name)
            claims[name] = claimed(auto, name)
        for name, act in acts.items():
            job = claims[name]
            # The peer holds the row with a change that is not committed: the reaper must not act on the old version.
            expire(auto, name)
            manual.execute("SELECT FROM fencepost.job WHERE operation = %s FOR NO KEY UPDATE", (name,))
            manual.execute(
                "UPDATE fencepost.job SET lease_until = now() + interval '1 h' WHERE operation = %s", (name,)
            )
            assert claim(auto, "reaper", [CLASS], 10) == []
            manual.commit()
            act(job.fence)
            assert claim(auto, "reaper", [CLASS], 10) == []
        assert [show(auto, name) for name in acts] == ["done", "running", "cancelled", "running"]
        assert effect(auto, "state", "begin") == "pending"
        expire(auto, "renew")
        assert [job.operation for job in claim(auto, "reaper", [CLASS], 10)] == ["renew"]


def test_whoever_waits_behind_the_reaper_finds_its_decision(database: Database) -> None:
    """B17, the other order: the reaper holds the row first, so completion and begin of the old attempt are refused."""
    with two(database) as (auto, manual):
        given(auto)
        job = claimed(auto)
        expire(auto)
        assert len(claim(manual, "reaper", [CLASS], 10)) == 1
        late = [
            Background(database, lambda conn: complete(conn, job.fence)),
            Background(database, lambda conn: begun(conn, job.fence)),
            Background(database, lambda conn: renew(conn, job.fence)),
        ]
        for session in late[:2]:
            waiting(auto, session.pid)
        manual.commit()
        for session in late[:2]:
            with pytest.raises(StaleFence) as refused:
                session.outcome()
            assert refused.value.field == "generation"
        with pytest.raises(Exception, match="generation|lock timeout"):
            late[2].outcome()
        assert show(auto) == "running"


def test_begin_and_takeover_race_at_the_edge_of_the_lease_without_a_wrong_claim(database: Database) -> None:
    """P3: either the begin was refused, or nobody claims until the effect is settled."""
    rounds = 40
    with database.connect(autocommit=True) as look, database.connect(autocommit=True) as holder:
        claims: list[str] = []
        stopping = threading.Event()

        def takeover(conn: Conn) -> None:
            while not stopping.is_set():
                claims.extend(job.operation for job in claim(conn, "taker", [CLASS], 1))

        given(look, "r-0")
        jobs = {"r-0": claimed(look, "r-0")}
        for number in range(1, rounds):
            given(look, f"r-{number}")
            jobs[f"r-{number}"] = claimed(look, f"r-{number}")
        takers = [Background(database, takeover) for _ in range(2)]
        begins = 0
        for number, (operation, job) in enumerate(jobs.items()):
            look.execute(
                "UPDATE fencepost.job SET lease_until = clock_timestamp() + %(us)s * interval '1 us' WHERE operation = %(o)s",
                {"us": 300 * 1.2**number, "o": operation},
            )
            try:
                begun(holder, job.fence, timeout=0.001)
                begins += 1
            except StaleFence:
                pass
        wait_for(lambda: len(claims) >= rounds - begins, 10, "the takeovers")
        stopping.set()
        for taker in takers:
            taker.outcome()
        wrong = look.execute(
            "SELECT e.operation FROM fencepost.effect AS e JOIN fencepost.attempt AS a"
            " ON a.tenant = e.tenant AND a.operation = e.operation AND a.class = e.class"
            " WHERE a.attempt <> e.begun_by AND a.claimed_at >= e.begun_at AND e.state IN ('pending', 'unknown')"
        ).fetchall()
        assert wrong == [] and begins + len(claims) == rounds
        assert 0 < begins < rounds, "the race has to go both ways to prove anything"


def test_many_workers_and_reapers_complete_each_job_once(database: Database) -> None:
    """B17, stress: leases end all the time, and still each job has one result and one terminal state."""
    jobs = 60
    with database.connect(autocommit=True) as look:
        for number in range(jobs):
            given(look, f"s-{number}", lease=0.1, max_attempts=1000)
        stopping = threading.Event()

        def work(conn: Conn) -> int:
            refused = 0
            while not stopping.is_set():
                for number, job in enumerate(claim(conn, "w", [CLASS], 5)):
                    if number % 2:
                        conn.execute("SELECT pg_sleep(0.03)")
                    try:
                        publish(conn, job.fence, partial(save, operation=job.operation))
                    except StaleFence:
                        refused += 1
            return refused

        workers = [Background(database, work) for _ in range(4)]
        done = "SELECT count(*) FROM fencepost.job WHERE exec = 'done'"
        wait_for(lambda: look.execute(done).fetchone() == (jobs,), 120, "all jobs to be done")
        stopping.set()
        for worker in workers:
            worker.outcome()
        assert look.execute("SELECT count(*) FROM result").fetchone() == (jobs,)
        assert look.execute("SELECT count(DISTINCT attempt) FROM fencepost.publication").fetchone() == (jobs,)
        assert results(look, "s-0") == ["a"]
