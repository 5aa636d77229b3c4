"""What was purged never becomes new: older events are refused, whoever is in flight while the horizon moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import Connection, IsolationLevel

from fencepost.consumer import acts
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Handled, Outcome, Reserved
from fencepost.consumer.reservation import reserve_in
from fencepost.consumer.retries import take
from fencepost.consumer.runner import Handling, RunnerOptions
from fencepost.consumer.upkeep import Purge, Purged, Upkeep
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import InvalidInput, NotArmed
from stack.postgres import MAJORS
from support.database import Database
from support.deliveries import Submitted, Withdrawn, envelope, from_kafka
from support.processes import wait_for
from support.services import Services

Tx = Connection[Any]
DEADLINE_SECONDS = 20.0
DAY = timedelta(days=1)
WINDOW = timedelta(days=7)

# Everything reserved and delivered so far happened that much earlier, by our own clock.
AGE: LiteralString = """
WITH r AS (UPDATE fencepost.reservation SET reserved_at = reserved_at - %(by)s::interval, last_at = last_at - %(by)s::interval)
UPDATE fencepost.unreserved_delivery SET first_at = first_at - %(by)s::interval, last_at = last_at - %(by)s::interval"""
WAITING: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE %(query)s"""


@inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)
def reports(tx: Tx, event: Submitted | Withdrawn) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


def aged(days: float, operation: str = "op-1", *, event: Submitted | Withdrawn | None = None) -> Envelope:
    """An event of so many days ago."""
    return envelope(event, operation=operation, time=datetime.now(UTC) - timedelta(days=days))


def handled(database: Database, *sent: Envelope, days: float) -> None:
    """Handled that many days ago."""
    for number, each in enumerate(sent):
        assert reports.handle(database.dsn, from_kafka(each, number)).outcome is Outcome.HANDLED
    with database.connect() as conn:
        conn.execute(AGE, {"by": timedelta(days=days)})


def declare(database: Database, window: timedelta | None = WINDOW, consumer: str = "reports") -> None:
    with database.connect() as conn:
        acts.set_retention(conn, consumer, window, actor="ann", reason="a test")


def purge(database: Database, **options: Any) -> Purged:
    with database.connect(autocommit=True) as conn:
        return Purge("reports", **options).turn(conn)


def left(database: Database, table: str = "reservation") -> int:
    with database.connect() as conn:
        return int(conn.execute(f"SELECT count(*) FROM fencepost.{table}".encode()).fetchall()[0][0])


def letters(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT operation, reason, attempts FROM fencepost.dead_letter ORDER BY id").fetchall()


def done(database: Database) -> int:
    with database.connect() as conn:
        return int(conn.execute("SELECT count(*) FROM done").fetchall()[0][0])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def wait_until_waiting(database: Database, query: str) -> None:
    with database.connect(autocommit=True) as conn:
        wait_for(
            lambda: conn.execute(WAITING, {"query": query}).fetchall()[0][0] >= 1, DEADLINE_SECONDS, f"{query} to wait"
        )


def test_what_was_purged_is_refused_as_before_the_horizon_and_never_handled_again(domain: Database) -> None:
    old, young = aged(30), aged(1, "op-2")
    handled(domain, old, young, days=30)
    assert purge(domain) == Purged(None, 0, 0, False), "nothing is forgotten until a window is declared"
    assert reports.handle(domain.dsn, from_kafka(old, 10)).outcome is Outcome.DUPLICATE
    with domain.connect() as conn:
        conn.execute(AGE, {"by": timedelta(days=30)})
    declare(domain)

    gone = purge(domain)

    # What is still reserved keeps the delivery that it was reserved with; the copy goes by its own time.
    assert (gone.reservations, gone.deliveries, left(domain), left(domain, "delivery")) == (1, 2, 1, 1)
    assert reports.handle(domain.dsn, from_kafka(young, 11)).outcome is Outcome.DUPLICATE
    for number in (0, 12, 12):
        assert reports.handle(domain.dsn, from_kafka(old, number)).outcome is Outcome.BEFORE_HORIZON
    assert reports.handle(domain.dsn, from_kafka(aged(1, "op-3"), 13)).outcome is Outcome.HANDLED, "the queue goes on"
    assert letters(domain) == [("op-1", "before_horizon", 1), ("op-1", "before_horizon", 2)]
    assert (done(domain), left(domain)) == (3, 2)


def test_rows_within_the_grace_behind_the_horizon_are_kept_and_still_recognised(domain: Database) -> None:
    late = aged(7.02)
    handled(domain, late, days=30)
    declare(domain)
    assert purge(domain).reservations == 0
    assert reports.handle(domain.dsn, from_kafka(late, 5)).outcome is Outcome.DUPLICATE
    with pytest.raises(InvalidInput) as refused:
        purge(domain, grace=timedelta(minutes=59))
    assert refused.value.field == "grace", "events of the last hour are not compared with the horizon"
    declare(domain, WINDOW - timedelta(hours=2))
    assert purge(domain).reservations == 1
    assert reports.handle(domain.dsn, from_kafka(late, 6)).outcome is Outcome.BEFORE_HORIZON


def test_a_young_event_is_never_taken_for_a_forgotten_one(domain: Database) -> None:
    """However short the window is: nothing of the last hour was deleted, so what is not known was not handled."""
    hour = 1 / 24
    known, missed, older = (aged(days, f"op-{n}") for n, days in enumerate((0.9 * hour, 0.8 * hour, 1.1 * hour)))
    handled(domain, known, days=30)
    declare(domain, timedelta(minutes=1))
    assert purge(domain).reservations == 0
    outcomes = [
        reports.handle(domain.dsn, from_kafka(each, 5 + n)).outcome for n, each in enumerate((known, missed, older))
    ]
    assert outcomes == [Outcome.DUPLICATE, Outcome.HANDLED, Outcome.BEFORE_HORIZON]


def test_a_sender_whose_clock_is_behind_is_not_forgotten_early_nor_one_ahead_ever_taken_for_old(
    domain: Database,
) -> None:
    behind, ahead = aged(30), aged(-300, "op-2")
    assert [reports.handle(domain.dsn, from_kafka(each, n)).outcome for n, each in enumerate((behind, ahead))] == [
        Outcome.HANDLED,
        Outcome.HANDLED,
    ]
    declare(domain)
    assert purge(domain).reservations == 0, "reserved just now by our own clock"
    assert reports.handle(domain.dsn, from_kafka(behind, 5)).outcome is Outcome.DUPLICATE
    with domain.connect() as conn:
        conn.execute(AGE, {"by": timedelta(days=30)})
    assert purge(domain).reservations == 1
    assert reports.handle(domain.dsn, from_kafka(ahead, 6)).outcome is Outcome.DUPLICATE


def test_a_consumer_that_was_down_for_longer_than_its_window_meets_its_backlog_before_it_forgets(
    domain: Database,
) -> None:
    known, missed = aged(30), aged(20, "op-2")
    handled(domain, known, days=30)
    declare(domain)
    purge(domain)  # Runs first, before the backlog is read.

    outcomes = [reports.handle(domain.dsn, from_kafka(each, 5 + n)).outcome for n, each in enumerate((known, missed))]

    assert outcomes == [Outcome.BEFORE_HORIZON] * 2, "refused and visible, neither handled again nor lost"
    with domain.connect() as conn:
        (first, second) = (
            row[0] for row in conn.execute("SELECT id FROM fencepost.dead_letter ORDER BY id").fetchall()
        )
        with pytest.raises(InvalidInput) as refused, conn.transaction():
            acts.retry(conn, second, actor="ann", reason="it was missed")
        assert refused.value.field == "unhandled"
        acts.retry(conn, second, actor="ann", reason="it was missed", unhandled=True)
    with domain.connect() as conn:
        given = take(conn, "reports")
    assert given is not None and given.dead_letter == second
    assert reports.handle(domain.dsn, given).outcome is Outcome.HANDLED
    assert reports.handle(domain.dsn, from_kafka(missed, 9)).outcome is Outcome.DUPLICATE
    assert purge(domain).reservations == 0, "it was reserved just now"
    assert letters(domain) == [("op-1", "before_horizon", 1)]
    assert first != second and done(domain) == 2


def test_types_declared_for_ever_survive_every_purge_but_do_not_unforget(domain: Database) -> None:
    with domain.connect() as conn:
        acts.keep_type(conn, "reports", "test.withdrawn", actor="ann", reason="irreversible")
    old = [aged(30), aged(30, "op-2", event=Withdrawn(tenant="acme", operation="op-2"))]
    handled(domain, *old, days=30)
    declare(domain)
    assert purge(domain).reservations == 1
    assert [reports.handle(domain.dsn, from_kafka(each, 5 + n)).outcome for n, each in enumerate(old)] == [
        Outcome.BEFORE_HORIZON,
        Outcome.DUPLICATE,
    ]
    fresh = aged(20, "op-3", event=Withdrawn(tenant="acme", operation="op-3"))
    assert reports.handle(domain.dsn, from_kafka(fresh, 8)).outcome is Outcome.HANDLED, "all of its history is there"

    with domain.connect() as conn:
        acts.keep_type(conn, "reports", "test.submitted", actor="ann", reason="irreversible from now on")
    assert reports.handle(domain.dsn, from_kafka(old[0], 9)).outcome is Outcome.BEFORE_HORIZON


def test_a_window_that_is_taken_back_leaves_the_horizon_where_it_was(domain: Database) -> None:
    old = aged(30)
    handled(domain, old, days=30)
    declare(domain)
    assert purge(domain).reservations == 1
    declare(domain, None)
    assert purge(domain) == Purged(None, 0, 0, False)
    assert reports.handle(domain.dsn, from_kafka(old, 5)).outcome is Outcome.BEFORE_HORIZON


def test_batches_are_bounded_go_on_where_they_ended_and_pass_over_what_is_kept(domain: Database) -> None:
    with domain.connect() as conn:
        acts.keep_type(conn, "reports", "test.withdrawn", actor="ann", reason="irreversible")
        moment = datetime.now(UTC) - 30 * DAY
        for number in range(30):
            event = Withdrawn(tenant="acme", operation=f"op-{number}") if number < 20 else None
            sent = envelope(
                event, operation=f"op-{number}", time=moment if number < 20 else moment + number * DAY / 1000
            )
            assert reserve_in(conn, "reports", sent, f"[{number}]").outcome is Reserved.RESERVED
        conn.execute(AGE, {"by": 30 * DAY})
    declare(domain)
    with domain.connect(autocommit=True) as conn:
        purging = Purge("reports", batch=4)
        first = purging.turn(conn, batches=1)
        assert (first.reservations, first.more) == (0, True), "twenty of one moment, all kept, are passed at once"
        second = purging.turn(conn, batches=1)
        assert (second.reservations, second.more) == (4, True)
        rest = purging.turn(conn)
        assert (rest.reservations, rest.more) == (6, False)
    assert (left(domain), left(domain, "delivery")) == (20, 20)


UNRESERVED: LiteralString = "SELECT operation, coordinates, unreserved FROM fencepost.delivery ORDER BY 1, 2"
TWICE: LiteralString = "SELECT count(*) - count(DISTINCT (consumer, coordinates)) FROM fencepost.delivery"


@pytest.mark.parametrize("many", [False, True], ids=["single", "batch"])
def test_a_delivery_that_nothing_was_reserved_with_is_told_from_the_one_that_was(domain: Database, many: bool) -> None:
    def deliver(*sent: tuple[Envelope, int]) -> list[Outcome]:
        deliveries = [from_kafka(each, number) for each, number in sent]
        if not many:
            return [reports.handle(domain.dsn, each).outcome for each in deliveries]
        return [r.outcome for r in reports.handle_many(domain.dsn, deliveries) if isinstance(r, Handled)]

    with domain.connect() as conn:
        conn.execute("INSERT INTO fencepost.consumer VALUES ('reports', interval '7 days', now() - interval '7 days')")
    event, old = aged(1), aged(30, "op-2")
    changed = envelope(Submitted(tenant="acme", operation="op-1", document="other"), time=datetime.now(UTC))
    assert deliver((event, 0), (aged(1, "op-3"), 1)) == [Outcome.HANDLED] * 2
    assert deliver((event, 0), (aged(1, "op-4"), 2)) == [Outcome.DUPLICATE, Outcome.HANDLED]
    assert deliver((event, 3)) == [Outcome.DUPLICATE]
    assert deliver((changed, 4)) == [Outcome.CONFLICT]
    assert deliver((old, 5)) == [Outcome.BEFORE_HORIZON]
    with domain.connect() as conn:
        found = [(row[0], row[2]) for row in conn.execute(UNRESERVED).fetchall()]
        assert found == [
            ("op-1", False),
            ("op-1", True),
            ("op-1", True),
            ("op-2", True),
            ("op-3", False),
            ("op-4", False),
        ]
        assert conn.execute(TWICE).fetchone() == (0,)


def test_a_reservation_stays_as_long_as_its_delivery_comes_back(domain: Database) -> None:
    again, once, held = aged(30), aged(30, "op-2"), aged(30, "op-3")
    handled(domain, again, once, held, days=30)
    declare(domain)
    assert reports.handle(domain.dsn, from_kafka(again, 0)).outcome is Outcome.DUPLICATE
    with domain.connect() as conn:
        # Somebody is at that delivery: nothing waits for him, and he finds it as it was.
        conn.execute("SELECT FROM fencepost.reservation WHERE operation = 'op-3' FOR UPDATE")
        gone = purge(domain)
        assert (gone.reservations, gone.deliveries) == (1, 1)
    assert reports.handle(domain.dsn, from_kafka(once, 1)).outcome is Outcome.BEFORE_HORIZON
    assert reports.handle(domain.dsn, from_kafka(held, 2)).outcome is Outcome.DUPLICATE
    with domain.connect() as conn:
        conn.execute(AGE, {"by": timedelta(days=30)})
    gone = purge(domain)
    assert (gone.reservations, gone.deliveries, left(domain), left(domain, "delivery")) == (2, 3, 0, 0)
    assert done(domain) == 3


@pytest.mark.parametrize("earlier", [True, False], ids=["horizon committed before", "horizon in the same commit"])
def test_a_copy_in_flight_while_its_history_is_deleted_waits_and_is_refused(
    domain: Database, threads: ThreadPoolExecutor, earlier: bool
) -> None:
    old = aged(30)
    handled(domain, old, days=30)
    declare(domain)
    with domain.connect() as purging:
        purging.execute("SELECT fencepost.advance_horizon('reports')")
        if earlier:
            purging.commit()
        purging.execute("SELECT fencepost.purge_reservations('reports', '-infinity', 10)")
        copy = threads.submit(reports.handle, domain.dsn, from_kafka(old, 5))
        wait_until_waiting(domain, "%reserve%")
        purging.commit()
    assert copy.result(DEADLINE_SECONDS).outcome is Outcome.BEFORE_HORIZON
    assert done(domain) == 1


def test_a_handler_in_flight_while_the_horizon_passes_its_event_commits_once(
    domain: Database, threads: ThreadPoolExecutor
) -> None:
    begun, go = threading.Event(), threading.Event()

    @inbox(consumer="reports")
    def slow(tx: Tx, event: Submitted) -> None:
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
        begun.set()
        assert go.wait(DEADLINE_SECONDS)

    old = aged(30)
    first = threads.submit(slow.handle, domain.dsn, from_kafka(old))
    assert begun.wait(DEADLINE_SECONDS)
    declare(domain)
    assert purge(domain).horizon is not None
    go.set()
    assert first.result(DEADLINE_SECONDS).outcome is Outcome.HANDLED
    assert reports.handle(domain.dsn, from_kafka(old, 5)).outcome is Outcome.DUPLICATE
    assert done(domain) == 1


@pytest.mark.parametrize("declared_before", [True, False], ids=["declared before", "declared after the snapshot"])
@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_an_old_snapshot_never_reads_an_old_horizon(
    domain: Database, level: IsolationLevel, declared_before: bool
) -> None:
    old, control = aged(30), aged(1, "op-2")
    handled(domain, old, days=30)
    if declared_before:
        declare(domain)
    with domain.connect() as conn:
        conn.isolation_level = level
        conn.execute("SELECT 1 FROM done")  # The snapshot.
        with conn.transaction(force_rollback=True):
            assert reserve_in(conn, "other", control, "[5]").outcome is Reserved.RESERVED
        declare(domain)
        assert purge(domain).reservations == 1
        with pytest.raises(psycopg.errors.SerializationFailure):
            reserve_in(conn, "reports", old, "[6]")
        conn.rollback()
        assert reserve_in(conn, "reports", old, "[6]").outcome is Reserved.BEFORE_HORIZON
        assert reserve_in(conn, "reports", control, "[5]").outcome is Reserved.RESERVED


def test_a_window_shorter_than_what_the_broker_keeps_is_refused(domain: Database) -> None:
    with domain.connect(autocommit=True) as conn:
        conn.execute("""SELECT fencepost.note_topics('reports', '{"a": 604800000, "b": 1000}')""")
        acts.set_retention(conn, "reports", WINDOW, actor="ann", reason="equal is enough")
        with pytest.raises(InvalidInput, match="a for 7 days") as refused:
            acts.set_retention(conn, "reports", 6 * DAY, actor="ann", reason="too short")
        assert refused.value.field == "replay_window"
        conn.execute("""SELECT fencepost.note_topics('reports', '{"b": -1}')""")
        with pytest.raises(InvalidInput, match="b for ever"):
            acts.set_retention(conn, "reports", WINDOW, actor="ann", reason="too short")
        acts.set_retention(conn, "other", DAY, actor="ann", reason="another consumer's own choice")
        acts.set_retention(conn, "reports", None, actor="ann", reason="for ever is never too short")
        for window in (timedelta(0), timedelta(seconds=-5), 40_000 * DAY):
            with pytest.raises(InvalidInput) as refused:
                acts.set_retention(conn, "other", window, actor="ann", reason="no window")
            assert refused.value.field == "replay_window"
        found = conn.execute(
            "SELECT subject, actor, verdict FROM fencepost.decision WHERE kind = 'inbox_retention' ORDER BY id"
        ).fetchall()[-3:]
    assert found == [("reports", "ann", "7 days"), ("other", "ann", "1 day"), ("reports", "ann", "for ever")]


def test_a_disarmed_database_forgets_nothing(domain18: Database) -> None:
    handled(domain18, aged(30), days=30)
    declare(domain18)
    with domain18.connect() as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
        with pytest.raises(NotArmed):
            Purge("reports").turn(conn)
    assert purge(domain18).reservations == 1  # the control


def test_upkeep_notes_topics_and_purges_by_itself(domain18: Database) -> None:
    handled(domain18, aged(30), days=30)
    declare(domain18)
    upkeep = Upkeep("reports", domain18.dsn, topics=lambda: {"a": 1000}, seconds=0.05)
    upkeep.start()
    try:
        wait_for(lambda: left(domain18) == 0, DEADLINE_SECONDS, "the purge")
    finally:
        upkeep.stop()
    assert left(domain18, "consumer_topic") == 1


def test_a_pooler_with_one_server_connection_carries_purges_and_retries(domain18: Database, services: Services) -> None:
    through = services.pgbouncer(MAJORS[0], pool_size=1).dsn(domain18.dsn)
    handled(domain18, aged(30), days=30)
    declare(domain18)
    upkeep = Upkeep("reports", through, seconds=0.05)
    upkeep.start()
    try:
        wait_for(lambda: left(domain18) == 0, DEADLINE_SECONDS, "the purge")
    finally:
        upkeep.stop()
    assert reports.handle(through, from_kafka(aged(30), 5)).outcome is Outcome.BEFORE_HORIZON
    with domain18.connect() as conn:
        number = conn.execute("SELECT id FROM fencepost.dead_letter").fetchall()[0][0]
        acts.retry(conn, number, actor="ann", reason="a test", unhandled=True)
    handling = Handling(reports, through, RunnerOptions(concurrency=1))
    assert handling.retry() and not handling.retry()
    handling.close()
    assert (letters(domain18), done(domain18)) == ([], 2)


def test_a_purge_deletes_nothing_of_another_consumer_and_nothing_unarmed(domain: Database) -> None:
    call = "SELECT purged FROM fencepost.purge_reservations('reports', '-infinity', 10)"
    handled(domain, aged(30), days=30)
    declare(domain)
    with domain.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.reservation SET consumer = 'other'")
        conn.execute("SELECT fencepost.advance_horizon('reports')")
        assert conn.execute(call).fetchone() == (0,)
        conn.execute("UPDATE fencepost.reservation SET consumer = 'reports'")
        with conn.transaction(force_rollback=True):
            conn.execute("DELETE FROM fencepost.ticket")
            with pytest.raises(NotArmed):
                conn.execute(call)
        assert conn.execute(call).fetchone() == (1,)


def test_a_reservation_stays_for_the_window_by_our_own_clock(domain: Database) -> None:
    call = "SELECT looked, purged FROM fencepost.purge_reservations('reports', '-infinity', 10)"
    handled(domain, aged(30), days=0)
    declare(domain)
    with domain.connect(autocommit=True) as conn:
        conn.execute("SELECT fencepost.advance_horizon('reports')")
        assert conn.execute(call).fetchone() == (1, 0)
        conn.execute(AGE, {"by": timedelta(days=30)})
        acts.set_retention(conn, "reports", None, actor="ann", reason="a window taken back")
        assert conn.execute(call).fetchone() == (0, 0), "it has a horizon still, and nothing is looked at"
        declare(domain)
        assert conn.execute(call).fetchone() == (1, 1)
