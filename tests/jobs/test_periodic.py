"""Schedules submit each due instant exactly once: whoever runs, dies, restarts, changes the definition or restores."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any

import psycopg
import psycopg.sql
import pytest

from fencepost.jobs import schedule as schedules
from fencepost.jobs.claim import Job
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.periodic import Periodic
from fencepost.jobs.schedule import Every, Missed, Schedule, define
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import ConfigError, InvalidInput
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import Conn, two
from support.processes import wait_for
from support.workers import QUICK, running

NAME = "report.hourly"
CLASS = "report.make"
HOUR = timedelta(hours=1)


def made(
    name: str = NAME,
    *,
    every: int = 3600,
    missed: Missed = "last",
    tenant: str = "acme",
    args: Callable[[datetime], Mapping[str, object]] | None = None,
) -> Schedule:
    return define(
        name,
        as_class(CLASS),
        tenant=tenant,
        cron=None,
        every=every,
        time_zone=None,
        args=args,
        missed=missed,
        grace=60.0,
    )


def beside(database: Database, *registered: Schedule, worker: str = "worker-a") -> Periodic:
    return Periodic(database.dsn, worker, registered or [made()])


def back(conn: Conn, hours: float, name: str = NAME) -> None:
    """Nobody ran for so long."""
    conn.execute(
        "UPDATE fencepost.schedule SET position = position - %(by)s, next_at = NULL WHERE schedule = %(name)s",
        {"by": timedelta(hours=hours), "name": name},
    )


def submitted(conn: Conn) -> list[datetime]:
    """The instants whose jobs are there, by their operations; never one twice, for the key would not let it."""
    rows = conn.execute("SELECT operation FROM fencepost.job WHERE class = %(c)s ORDER BY 1", {"c": CLASS}).fetchall()
    return [datetime.fromisoformat(str(row[0]).partition("@")[2]).astimezone(UTC) for row in rows]


def state(conn: Conn, column: str, name: str = NAME) -> Any:
    query = psycopg.sql.SQL("SELECT {} FROM fencepost.schedule WHERE schedule = %(n)s").format(
        psycopg.sql.Identifier(column)
    )
    row = conn.execute(query, {"n": name}).fetchone()
    assert row is not None
    return row[0]


def passed(conn: Conn, hours: int) -> list[datetime]:
    """The hours that have passed in so many hours up to now, by the database's clock."""
    row = conn.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    last = row[0].astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return [last - HOUR * n for n in range(hours)][::-1]


def within_an_hour(conn: Conn) -> None:
    """Waits for the full hour where it is less than 15 s away: afterwards the same instants have passed for a while."""
    early = "SELECT extract(epoch FROM clock_timestamp())::numeric % 3600 < 3585"
    wait_for(lambda: conn.execute(early).fetchone() == (True,), 30, "the full hour")


def test_a_new_schedule_starts_now_and_each_instant_is_one_job_with_its_arguments(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        within_an_hour(conn)
        first = beside(database18)
        assert 0 < first.turn(conn)
        assert submitted(conn) == []
        assert state(conn, "next_at") == passed(conn, 1)[0] + HOUR

        back(conn, 1)
        due = passed(conn, 1)
        first.turn(conn)
        beside(database18, worker="worker-b").turn(conn)
        assert submitted(conn) == due
        row = conn.execute("SELECT tenant, operation, args, run_at FROM fencepost.job").fetchone()
        at = f"{due[0]:%Y-%m-%dT%H:%M:%SZ}"
        content = b'{"schedule":"report.hourly","at":"%s"}' % at.encode()
        assert row == ("acme", f"{NAME}@{at}", content, due[0])
        assert (state(conn, "submitted"), state(conn, "missed_count"), state(conn, "last_at")) == (1, 0, due[0])


NOW = datetime(2026, 11, 30, 12, 10, tzinfo=UTC)
NOON = NOW.replace(minute=0)
PASSED = [NOON - HOUR * n for n in range(5)][::-1]


@pytest.mark.parametrize(
    ("missed", "chosen", "counted"), [("last", PASSED[-1:], 4), ("all", PASSED, 0), ("skip", [], 5)]
)
def test_what_was_missed_while_nobody_ran(
    database18: Database, missed: Missed, chosen: list[datetime], counted: int
) -> None:
    hourly = made(missed=missed)
    assert hourly.due(NOON - HOUR * 4.5, NOW) == (chosen, counted)
    with database18.connect(autocommit=True) as conn:
        periodic = beside(database18, hourly)
        periodic.turn(conn)
        back(conn, 4.5)
        position = state(conn, "position")
        periodic.turn(conn)
        # As the rule above says, of the moment at which the database was asked.
        expected, others = hourly.due(position.astimezone(UTC), state(conn, "position").astimezone(UTC))
        assert len(expected) + others in (4, 5)
        assert (submitted(conn), state(conn, "missed_count")) == (expected, others)


def test_skip_runs_what_is_within_its_grace_and_all_has_a_limit() -> None:
    now = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
    minute = made(every=60, missed="skip")
    assert minute.due(now - HOUR, now) == ([now.replace(second=0)], 59)
    assert minute.due(now - timedelta(seconds=40), now) == ([now.replace(second=0)], 0)
    chosen, _ = made(every=60, missed="all").due(now - timedelta(days=9000), now)
    assert len(chosen) == schedules.LATE_MAX and chosen[-1] == now.replace(second=0)
    # Not every second of a hundred years is looked at.
    chosen, _ = made(every=1, missed="last").due(now - timedelta(days=36_500), now)
    assert chosen == [now]


def test_several_workers_and_lost_connections_submit_every_instant_once(database18: Database) -> None:
    """Each of four workers loses its connection again and again, in the middle of whatever it does."""
    hours = 400
    stopped = threading.Event()

    def work(name: str) -> None:
        periodic = beside(database18, made(missed="all"), worker=name)
        while not stopped.is_set():
            try:
                with database18.connect(autocommit=True) as mine:
                    while not stopped.is_set():
                        periodic.turn(mine)
            except psycopg.OperationalError:
                continue

    with database18.connect(autocommit=True) as conn:
        beside(database18, made(missed="all")).turn(conn)
        back(conn, hours)
        start = state(conn, "position").astimezone(UTC)
        threads = [threading.Thread(target=work, args=(f"worker-{n}",), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        reached = vain = 0
        try:

            def disturbed() -> bool:
                nonlocal reached, vain
                done = state(conn, "submitted")
                reached, vain = done, 0 if done > reached else vain + 1
                # More and more seldom while nothing gets through: a slow machine needs longer between two losses.
                conn.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND random() < 0.2 / (1 + %(vain)s / 10.0)",
                    {"vain": vain},
                )
                return state(conn, "next_at") is not None and state(conn, "submitted") >= hours

            wait_for(disturbed, 120, "every instant to be submitted")
        finally:
            stopped.set()
            for thread in threads:
                thread.join(20)
        end = state(conn, "position").astimezone(UTC)
        due = list(takewhile(lambda at: at <= end, Every(3600).after(start)))
        assert len(due) >= hours and submitted(conn) == due
        # Counted in the same transaction as the jobs: none was submitted by a transaction that did not move it on.
        assert len(submitted(conn)) == state(conn, "submitted") and state(conn, "missed_count") == 0


def test_who_takes_a_schedule_and_dies_has_done_nothing_and_others_pass_it_by_meanwhile(database18: Database) -> None:
    """Crash here: [S]."""
    with two(database18) as (conn, dying):
        within_an_hour(conn)
        other = beside(database18, made(), made("report.other"), worker="worker-b")
        other.turn(conn)
        back(conn, 1)
        back(conn, 1, "report.other")
        due = passed(conn, 1)
        taken = schedules.take(dying, {NAME: 1}, "worker-a")
        assert taken is not None
        submit(dying, CLASS, tenant="acme", operation=made().operation(due[0]), args={"n": 1})

        other.turn(conn)
        assert [str(r[0]).partition("@")[0] for r in conn.execute("SELECT operation FROM fencepost.job")] == [
            "report.other"
        ]
        dying.rollback()
        other.turn(conn)
        rows = conn.execute("SELECT operation FROM fencepost.job ORDER BY 1").fetchall()
        assert [row[0] for row in rows] == [f"{n}@{due[0]:%Y-%m-%dT%H:%M:%SZ}" for n in (NAME, "report.other")]


def test_a_changed_definition_goes_on_where_the_old_one_was_and_old_workers_leave_it(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database18.connect(autocommit=True) as conn:
        within_an_hour(conn)
        old = beside(database18, made(missed="all"))
        old.turn(conn)
        # Overdue by three hours, and changed: those hours are not lost, and what came before them is not run again.
        conn.execute(
            "UPDATE fencepost.schedule SET position = position - interval '9 days', next_at = date_trunc('hour',"
            " clock_timestamp()) - interval '2 hours'"
        )
        new = beside(database18, made(missed="all", every=1800), worker="worker-b")
        new.turn(conn)
        half_hours = [at for at in submitted(conn) if at >= passed(conn, 3)[0]]
        assert len(half_hours) in (5, 6) and submitted(conn) == half_hours
        assert (state(conn, "version"), state(conn, "timetable")) == (2, "every 1800 s")

        # The old worker's definition is not current any more, now and after it has looked again.
        back(conn, 1)
        conn.execute("UPDATE fencepost.schedule SET version = 2")
        before = len(submitted(conn))
        old.turn(conn)
        monkeypatch.setattr("fencepost.jobs.periodic.AGAIN_SECONDS", 0.0)
        old.turn(conn)
        assert (len(submitted(conn)), state(conn, "version")) == (before, 2)
        # Nobody of the new definition is left: the old one is better than none.
        conn.execute("UPDATE fencepost.schedule SET seen_at = seen_at - interval '3 minutes'")
        old.turn(conn)
        assert (state(conn, "version"), state(conn, "timetable")) == (3, "every 3600 s")
        new.turn(conn)
        assert state(conn, "version") == 3


def test_a_running_worker_keeps_its_schedules_seen(database18: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with database18.connect(autocommit=True) as conn:
        periodic = beside(database18)
        periodic.turn(conn)
        conn.execute("UPDATE fencepost.schedule SET seen_at = seen_at - interval '1 minute'")
        was = state(conn, "seen_at")
        monkeypatch.setattr("fencepost.jobs.periodic.SEE_SECONDS", 0.0)
        periodic.turn(conn)
        assert state(conn, "seen_at") > was


def test_arguments_that_fail_hold_up_their_own_schedule_only_and_lose_nothing(
    database18: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [True]

    def args(at: datetime) -> Mapping[str, object]:
        if broken[0]:
            raise ValueError("the customer's secret")
        return {"day": f"{at:%Y-%m-%d}"}

    with database18.connect(autocommit=True) as conn:
        within_an_hour(conn)
        periodic = beside(database18, made("a.broken", args=args), made("b.whole"))
        periodic.turn(conn)
        back(conn, 1, "a.broken")
        back(conn, 1, "b.whole")
        due = passed(conn, 1)
        monkeypatch.setattr("fencepost.jobs.periodic.AGAIN_SECONDS", 0.0)
        periodic.turn(conn)
        assert [str(row[0]) for row in conn.execute("SELECT operation FROM fencepost.job")] == [
            f"b.whole@{due[0]:%Y-%m-%dT%H:%M:%SZ}"
        ]
        assert "a.broken" in caplog.text and "ValueError" in caplog.text and "secret" not in caplog.text
        broken[0] = False
        periodic.turn(conn)
        assert submitted(conn) == due * 2


def test_an_instant_whose_job_is_there_with_other_arguments_is_passed(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with database18.connect(autocommit=True) as conn:
        within_an_hour(conn)
        periodic = beside(database18, made(missed="all"))
        periodic.turn(conn)
        back(conn, 2)
        due = passed(conn, 2)
        with conn.transaction():
            submit(conn, CLASS, tenant="acme", operation=made().operation(due[0]), args={"other": 1})
        periodic.turn(conn)
        assert submitted(conn) == due and "with other arguments" in caplog.text


def test_a_disarmed_database_submits_nothing_and_after_a_restore_nothing_is_submitted_twice(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "fencepost")
    with database18.connect(autocommit=True) as conn:
        within_an_hour(conn)
        periodic = beside(database18, made(missed="all"))
        periodic.turn(conn)
        back(conn, 3)
        due = passed(conn, 3)
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
        periodic.turn(conn)
        assert submitted(conn) == []
        conn.execute("UPDATE fencepost.ticket SET xid = pg_current_xact_id()")
        conn.execute("UPDATE fencepost.installation SET era = era + 1")
        try:
            periodic.turn(conn)
            assert submitted(conn) == [] and "after the restore" in caplog.text
            # The control: in the era of its position the same hours are due.
            back(conn, 3)
            periodic.turn(conn)
            assert submitted(conn) == due
        finally:
            conn.execute("UPDATE fencepost.installation SET era = era - 1")


def test_a_removed_schedule_stays_away_until_a_worker_starts_with_it(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = "SELECT fencepost.remove_schedule(%(n)s, 'ann', 'moved')"
    with database18.connect(autocommit=True) as conn:
        periodic = beside(database18)
        periodic.turn(conn)
        with pytest.raises(InvalidInput) as refused:
            conn.execute(remove, {"n": NAME})
        assert refused.value.field == "seen_at"
        conn.execute("UPDATE fencepost.schedule SET seen_at = seen_at - interval '61 seconds'")
        conn.execute(remove, {"n": NAME})
        monkeypatch.setattr("fencepost.jobs.periodic.AGAIN_SECONDS", 0.0)
        for _ in range(2):
            periodic.turn(conn)
            assert conn.execute("SELECT count(*) FROM fencepost.schedule").fetchone() == (0,)
        assert conn.execute("SELECT kind, subject, actor, reason FROM fencepost.decision").fetchall() == [
            ("remove_schedule", NAME, "ann", "moved")
        ]
        with pytest.raises(InvalidInput) as unknown:
            conn.execute(remove, {"n": NAME})
        assert unknown.value.field == "schedule"
        beside(database18).turn(conn)
        assert state(conn, "version") == 1


def test_a_worker_runs_what_its_schedules_submit(database18: Database) -> None:
    worker = Worker()
    ran: list[Any] = []

    @worker.periodic("tick.second", tenant="acme", every=timedelta(seconds=1))
    @worker.periodic("tick.late", tenant="acme", cron="0 3 * * *", time_zone="Europe/Berlin")
    @worker.job("tick", **QUICK)
    async def tick(ctx: AsyncContext, job: Job) -> None:
        ran.append(job.json()["at"])

    @worker.periodic("tack.second", tenant="acme", every=1, args=lambda at: {"second": at.second})
    def tack(ctx: Context, job: Job) -> None:
        ran.append(job.json()["second"])

    assert worker.classes == ("tick", "tack.second")
    with database18.connect(autocommit=True) as conn, running(worker, database18):
        count = partial(
            conn.execute,
            "SELECT count(*) FILTER (WHERE class = 'tick'), count(*) FILTER (WHERE class = 'tack.second')"
            " FROM fencepost.job WHERE exec = 'done'",
        )

        def enough() -> bool:
            row = count().fetchone()
            return row is not None and min(row) >= 2

        wait_for(enough, 30, "each of two schedules to have run twice")
        assert state(conn, "timetable", "tick.late") == "0 3 * * * Europe/Berlin"
    assert {type(each) for each in ran} == {str, int}


def test_schedules_are_refused_by_field_before_anything_runs() -> None:
    def handler(ctx: Context, job: Job) -> None: ...

    ok: dict[str, Any] = {"tenant": "acme", "every": 60}
    Worker().periodic(NAME, **ok)(handler)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"every": None}, "cron"),
        ({"cron": "0 3 * * *"}, "cron"),
        ({"every": None, "cron": "0 3 * *"}, "cron"),
        ({"every": None, "cron": "0 3 * * *", "time_zone": "Nowhere"}, "time_zone"),
        ({"time_zone": "UTC"}, "time_zone"),
        ({"every": 0}, "every"),
        ({"every": 0.5}, "every"),
        ({"every": timedelta(milliseconds=1500)}, "every"),
        ({"missed": "sometimes"}, "missed"),
        ({"tenant": ""}, "tenant"),
    ]
    for changed, field in cases:
        with pytest.raises((InvalidInput, ConfigError)) as refused:
            Worker().periodic(NAME, **ok | changed)(handler)
        assert refused.value.field == field, changed
    with pytest.raises(InvalidInput) as named:
        Worker().periodic("Not A Name", **ok)(handler)
    assert named.value.field == "schedule"

    worker = Worker()
    worker.periodic(NAME, **ok)(handler)
    with pytest.raises(ConfigError) as twice:
        worker.periodic(NAME, **ok)(handler)
    assert twice.value.field == "schedule"
    with pytest.raises(ConfigError, match="above @worker.job"):
        worker.job(CLASS)(handler)


def test_without_the_library_for_cron_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(ctx: Context, job: Job) -> None: ...

    Worker().periodic(NAME, tenant="acme", cron="0 3 * * *")(handler)
    monkeypatch.setitem(sys.modules, "cronsim", None)
    monkeypatch.delitem(sys.modules, "fencepost.jobs.cron")
    with pytest.raises(ConfigError) as refused:
        Worker().periodic(NAME, tenant="acme", cron="0 3 * * *")(handler)
    assert "cronsim" in str(refused.value) and "fencepost[periodic]" in str(refused.value)
    Worker().periodic(NAME, tenant="acme", every=60)(handler)


def test_intervals_are_the_same_instants_wherever_one_starts() -> None:
    start = datetime(2026, 11, 30, 11, 59, 59, 999_999, tzinfo=UTC)
    found = Every(3600).after(start)
    assert [next(found) for _ in range(2)] == [
        start + timedelta(microseconds=1),
        start + timedelta(seconds=3600.000001),
    ]
    assert next(Every(7200).after(start + timedelta(minutes=30))) == datetime(2026, 11, 30, 14, tzinfo=UTC)
