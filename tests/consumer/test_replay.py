"""A projection is built from history exactly once, by a login that can cause nothing, and readers see all of it or none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict

from fencepost.consumer import outbox_history, shadow
from fencepost.consumer.history import Bound, History
from fencepost.consumer.kafka_history import KafkaHistory
from fencepost.consumer.outbox_history import OutboxHistory
from fencepost.consumer.projection import Projection, projection
from fencepost.consumer.replay import Progress, replay
from fencepost.jobs.publish import publish
from fencepost.relay.destination import NoRoute
from fencepost.relay.recycling import recycle_outbox
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import (
    CommitWasRollback,
    ConfigError,
    FencepostError,
    InvalidInput,
    ReplayRefused,
    UnknownClass,
)
from fencepost.schemas.event import Event
from support import jobs
from support.database import Databases
from support.deliveries import envelope
from support.memory_broker import MemoryBroker
from support.processes import Child, wait_for
from support.projections import Paid, accept, expected, newer_version, produce, projector, rows, sent, totals
from support.relays import BRISK, destination, loop, relay_once
from support.roles import Roles, separated
from support.services import Kafka

ROOT = Path(__file__).parents[2]
RESET = """
DROP SCHEMA IF EXISTS totals_shadow, totals_old CASCADE;
DROP TABLE IF EXISTS totals, totals_replay, totals_newest, totals_held CASCADE;
"""


@pytest.fixture(scope="module")
def installation(databases18: Databases) -> Iterator[Roles]:
    with separated(databases18) as made:
        yield made


@pytest.fixture
def roles(installation: Roles) -> Roles:
    with installation.database.connect(autocommit=True) as conn:
        conn.execute(RESET)
        conn.execute("DELETE FROM fencepost.outbox")
        conn.execute("DELETE FROM fencepost.event_key")
    return installation


@pytest.fixture
def dsn(roles: Roles) -> str:
    """The projector's login, with its tables made."""
    return projector(roles)


Filled = Callable[..., History]


@pytest.fixture(params=["kafka", "outbox"])
def filled(request: pytest.FixtureRequest, roles: Roles, dsn: str) -> Filled:
    """Makes a history of the events with these numbers, in this order, on Kafka and in the outbox."""
    if request.param == "outbox":

        def in_outbox(*numbers: int, since: Bound = "beginning", until: Bound = "end") -> History:
            with roles.database.connect() as conn:
                accept(conn, *numbers)
            return OutboxHistory(dsn, since, until)

        return in_outbox
    kafka: Kafka = request.getfixturevalue("kafka")
    topic = kafka.topic()

    def on_kafka(*numbers: int, since: Bound = "beginning", until: Bound = "end") -> History:
        produce(kafka.bootstrap, topic, [sent(n) for n in numbers])
        return KafkaHistory(kafka.bootstrap, topic, since, until)

    return on_kafka


def seen(roles: Roles, schema: str = "public") -> dict[str, tuple[int, int]]:
    with roles.database.connect() as conn:
        return rows(conn, schema)


def test_a_history_becomes_the_tables_and_what_was_there_is_kept_until_it_is_dropped(
    roles: Roles, dsn: str, filled: Filled
) -> None:
    with roles.database.connect(autocommit=True) as conn:
        conn.execute("INSERT INTO totals VALUES ('wrong', 9, 9)")
    told: list[Progress] = []

    done = replay(totals, dsn, filled(*range(1, 31)), told=told.append)

    assert done == Progress(30, 30, 30, 0, 0, 0, swapped=True)
    assert told[0].read == 0 and told[-1].read == 30
    assert seen(roles) == expected(range(1, 31))
    assert seen(roles, "totals_old") == {"wrong": (9, 9)}
    with pytest.raises(ReplayRefused, match="--drop-old") as refused:
        replay(totals, dsn, filled())
    assert refused.value.field == "old"
    assert replay(totals, dsn, filled(31), drop_old=True).swapped
    assert seen(roles) == expected(range(1, 32))
    with roles.database.connect() as conn:
        left = conn.execute("SELECT to_regclass('totals_old.totals'), to_regclass('totals_shadow.totals')").fetchone()
    assert left == (None, None)


def test_it_goes_on_where_it_was_stopped_and_readers_see_nothing_of_it_before(
    roles: Roles, dsn: str, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_history, "WINDOW", 10)
    monkeypatch.setattr("fencepost.consumer.kafka_history.BATCH", 10)
    history = filled(*range(1, 41))
    stop = threading.Event()

    def after_some(progress: Progress) -> None:
        if progress.read >= 20:
            stop.set()

    first = replay(totals, dsn, history, stop=stop, told=after_some)
    assert (first.complete, first.swapped, first.read) == (False, False, 20)
    assert seen(roles) == {}
    assert seen(roles, "totals_shadow") == expected(range(1, 21))

    # What came after the beginning of the build is not a part of it.
    again = filled(41)
    assert replay(totals, dsn, again) == Progress(40, 40, 40, 0, 0, 0, swapped=True)
    assert seen(roles) == expected(range(1, 41))


def test_another_range_does_not_go_on_with_a_build_unless_it_restarts(roles: Roles, dsn: str, filled: Filled) -> None:
    stop = threading.Event()
    stop.set()
    assert not replay(totals, dsn, filled(1, 2, 3), stop=stop).swapped
    with pytest.raises(ReplayRefused, match="--restart") as refused:
        replay(totals, dsn, filled(since=2))
    assert refused.value.field == "range"
    assert replay(totals, dsn, filled(), restart=True).applied == 3


def test_a_failing_handler_leaves_its_batch_out_and_the_position_before_it(
    roles: Roles, dsn: str, filled: Filled
) -> None:
    broken = True

    @projection(name="totals", tables=("totals",))
    def fails(tx: Connection[Any], event: Paid) -> None:
        tx.execute("INSERT INTO totals VALUES (%s, 1, %s) ON CONFLICT DO NOTHING", (event.operation, event.amount))
        if broken and event.amount == 5:
            raise RuntimeError("not today")

    history = filled(*range(1, 9))
    with pytest.raises(ReplayRefused, match="raised RuntimeError") as refused:
        replay(fails, dsn, history)
    assert "not today" not in str(refused.value) and isinstance(refused.value.__cause__, RuntimeError)
    assert seen(roles, "totals_shadow") == {}
    broken = False
    assert replay(fails, dsn, filled()).applied == 8
    assert len(seen(roles)) == 8


def test_copies_and_overtaken_events_change_nothing(roles: Roles, dsn: str, kafka: Kafka) -> None:
    topic = kafka.topic()
    produce(kafka.bootstrap, topic, [sent(n) for n in (1, 2, 3, 4, 4, 1, 7, 5, 8, 7)])
    done = replay(totals, dsn, KafkaHistory(kafka.bootstrap, topic))
    # 4 again, 1 again and 7 again are copies. Accounts are numbers modulo 3: 5 is newer than 2 in its account.
    assert (done.applied, done.older) == (7, 3)
    assert seen(roles) == expected((1, 2, 3, 4, 7, 5, 8))


def test_without_newest_only_the_handler_gets_everything_and_compares_for_itself(
    roles: Roles, dsn: str, kafka: Kafka
) -> None:
    got: list[int] = []

    @projection(name="totals", tables=("totals",), newest_only=False)
    def all_of_them(tx: Connection[Any], event: Envelope) -> None:
        got.append(event.sequence)

    topic = kafka.topic()
    produce(kafka.bootstrap, topic, [sent(n) for n in (1, 4, 4, 1)])
    assert replay(all_of_them, dsn, KafkaHistory(kafka.bootstrap, topic)).applied == 4
    assert got == [1, 4, 4, 1]


def test_what_cannot_be_read_is_held_and_listed_and_nothing_is_swapped_until_it_is_accepted(
    roles: Roles, dsn: str, kafka: Kafka
) -> None:
    topic = kafka.topic()
    produce(kafka.bootstrap, topic, [sent(1), newer_version(2), (sent(3), b'{"amount":999}'), (sent(4), b"{"), sent(5)])
    done = replay(totals, dsn, KafkaHistory(kafka.bootstrap, topic))

    assert (done.applied, done.held, done.complete, done.swapped) == (2, 3, True, False)
    assert seen(roles) == {}
    with roles.database.connect() as conn:
        held = conn.execute("SELECT place, reason, type, version, operation FROM totals_shadow.totals_held ORDER BY 1")
        found = held.fetchall()
        assert [(r[0], r[2:]) for r in found] == [
            (1, ("test.paid", 2, "op-2")),
            (2, ("test.paid", 1, "op-3")),
            (3, ("test.paid", 1, "op-4")),
        ]
        assert [r[1] for r in found][1:] == ["digest_mismatch", "malformed_json"]
        assert found[0][1] in ("unknown_version", "newer_version")
    assert replay(totals, dsn, KafkaHistory(kafka.bootstrap, topic), accept_held=True).swapped
    assert seen(roles) == expected((1, 5))


def test_a_message_that_is_no_event_is_held_and_types_of_others_are_passed_over(
    roles: Roles, dsn: str, kafka: Kafka
) -> None:
    class Unpaid(Event, type="test.unpaid", version=1):
        pass

    topic = kafka.topic()
    other = envelope(Unpaid(tenant="acme", operation="x"), sequence=9)
    produce(kafka.bootstrap, topic, [sent(1), other, sent(2)])
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    producer.produce(topic, value=b"hello", partition=0)
    assert producer.flush(20) == 0
    done = replay(totals, dsn, KafkaHistory(kafka.bootstrap, topic))
    assert (done.applied, done.passed_over, done.held) == (2, 1, 1)


def test_only_the_chosen_range_is_read(roles: Roles, dsn: str, filled: Filled) -> None:
    history, one = filled(*range(1, 11)), 0
    if isinstance(history, OutboxHistory):
        with roles.database.connect() as conn:
            (one,) = conn.execute("SELECT min(seq) FROM fencepost.outbox").fetchone() or (0,)
    for since, until, numbers in (
        (one + 2, one + 5, range(3, 7)),
        ("beginning", one + 1, range(1, 3)),
        (one + 8, "end", range(9, 11)),
        (one + 50, "end", range(0)),
        (datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC), range(1, 11)),
        (datetime(2100, 1, 1, tzinfo=UTC), "end", range(0)),
    ):
        done = replay(totals, dsn, filled(since=since, until=until), drop_old=True)
        assert (done.swapped, seen(roles)) == (True, expected(numbers)), (since, until)


def test_several_partitions_keep_the_order_of_each(roles: Roles, dsn: str, real_kafka: Kafka) -> None:
    topic = real_kafka.topic(3)
    for partition in range(3):
        produce(real_kafka.bootstrap, topic, [sent(n) for n in range(1, 91) if n % 3 == partition], partition)
    done = replay(totals, dsn, KafkaHistory(real_kafka.bootstrap, topic))
    assert (done.applied, done.older, done.swapped) == (90, 0, True)
    assert seen(roles) == expected(range(1, 91))


def test_a_transaction_that_commits_later_with_a_lower_number_belongs_to_no_part_of_a_replay(
    roles: Roles, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_history, "WINDOW", 4)
    stop = threading.Event()
    with roles.database.connect() as late:
        with roles.database.connect() as conn:
            accept(conn, 1, 2, 3, 4, 5)
        accept(late, 6)
        with roles.database.connect() as conn:
            accept(conn, 7, 8)

        def after_some(progress: Progress) -> None:
            if progress.read:
                stop.set()

        assert not replay(totals, dsn, OutboxHistory(dsn), stop=stop, told=after_some).complete
        late.commit()
    assert replay(totals, dsn, OutboxHistory(dsn)).swapped
    assert seen(roles) == expected((1, 2, 3, 4, 5, 7, 8))
    assert replay(totals, dsn, OutboxHistory(dsn), drop_old=True).swapped
    assert seen(roles) == expected(range(1, 9))


def test_recycled_numbers_are_refused_and_the_beginning_is_the_oldest_complete_one(
    databases: Databases,
) -> None:
    with separated(databases) as made:
        dsn = projector(made)
        with made.database.connect() as conn:
            accept(conn, 1, 2)
        assert replay(totals, dsn, OutboxHistory(dsn, 1)).applied == 2  # the allowed control
        to = destination(MemoryBroker())
        relay_once(made.database, to)
        loop(made.database, NoRoute(), pace=replace(BRISK, record=0.0)).run(once=True)
        with made.database.connect(autocommit=True) as conn:
            conn.execute("SELECT fencepost.set_retention('0', NULL, 'ops', 'a test')")
            assert [recycle_outbox(conn, min_age=0).outcome for _ in range(2)] == ["opened", "recycled"]
        with made.database.connect() as conn:
            accept(conn, 3)
        with pytest.raises(InvalidInput, match="recycled") as refused:
            replay(totals, dsn, OutboxHistory(dsn, 1), drop_old=True)
        assert refused.value.field == "from" and "3" in str(refused.value)
        assert replay(totals, dsn, OutboxHistory(dsn), drop_old=True).applied == 1


def test_deleted_offsets_are_refused_and_not_skipped(roles: Roles, dsn: str, real_kafka: Kafka) -> None:
    topic = real_kafka.topic()
    produce(real_kafka.bootstrap, topic, [sent(n) for n in range(1, 6)])
    stop = threading.Event()
    stop.set()
    assert not replay(totals, dsn, KafkaHistory(real_kafka.bootstrap, topic), stop=stop).complete
    admin: Any = AdminClient({"bootstrap.servers": real_kafka.bootstrap, "log_level": 0})
    for future in admin.delete_records([TopicPartition(topic, 0, 2)]).values():
        future.result(timeout=20)
    with pytest.raises(ReplayRefused, match="deleted by the topic's retention"):
        replay(totals, dsn, KafkaHistory(real_kafka.bootstrap, topic))
    with pytest.raises(InvalidInput, match="offsets below 2"):
        replay(totals, dsn, KafkaHistory(real_kafka.bootstrap, topic, 0), restart=True)
    assert replay(totals, dsn, KafkaHistory(real_kafka.bootstrap, topic, 2)).applied == 3


# Nothing can be caused.

ATTEMPTS = {
    "enqueue": """SELECT fencepost.enqueue(gen_random_uuid(), 't', 'made', 'a.b', 1, 'k', 'ref:x', 'application/json', NULL, '\\x7b7d')""",
    "submit": "SELECT fencepost.submit('t', 'made', 'c', '\\x7b7d', 'ref:x')",
    "reserve": """SELECT fencepost.reserve('t', 'c', 'made', 'a.b', 1, gen_random_uuid(), 'urn:x', 1, 'ref:x', clock_timestamp(),
                  '["test"]', '[]', '\\x7b7d')""",
    "claim": "SELECT fencepost.claim('w', '{c}', 1)",
}
CALLERS = {"enqueue": "producer", "submit": "producer", "reserve": "consumer", "claim": "executor"}


@pytest.mark.parametrize("name", sorted(CALLERS))
def test_a_handler_that_tries_to_cause_something_is_refused_by_postgresql_with_the_roles_name(
    roles: Roles, dsn: str, filled: Filled, name: str
) -> None:
    def attempt(tx: Connection[Any]) -> None:
        tx.execute(ATTEMPTS[name].encode())

    with roles.login(CALLERS[name]).connect() as allowed:
        with suppress(UnknownClass):  # the control: another role may, or is told what is missing
            attempt(allowed)
        allowed.rollback()

    @projection(name="totals", tables=("totals",))
    def tries(tx: Connection[Any], event: Paid) -> None:
        attempt(tx)

    with pytest.raises(ReplayRefused) as refused:
        replay(tries, dsn, filled(1))
    assert refused.value.field == "handler"
    assert f"permission denied for function {name}" in str(refused.value)
    assert roles.role("projector") in str(refused.value)
    assert seen(roles, "totals_shadow") == {}
    assert replay(totals, dsn, filled()).applied == 1


BEGIN_EFFECT = """SELECT fencepost.begin_effect('t', 'o', 'c', 1, gen_random_uuid(), 'w', 1, 'e', 'opaque', gen_random_uuid(),
                   '\\x00', interval '1 s')"""


def test_an_effect_attempted_in_a_replay_is_refused_and_leaves_no_row(roles: Roles, dsn: str, filled: Filled) -> None:
    with roles.login("executor").connect() as allowed, pytest.raises(FencepostError):
        allowed.execute(BEGIN_EFFECT.encode())  # the control: reached, and told that there is no such job

    @projection(name="totals", tables=("totals",))
    def tries(tx: Connection[Any], event: Paid) -> None:
        tx.execute(BEGIN_EFFECT.encode())

    with pytest.raises(ReplayRefused, match="permission denied for function begin_effect") as refused:
        replay(tries, dsn, filled(1))
    assert roles.role("projector") in str(refused.value)
    with roles.database.connect() as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.effect WHERE operation = 'o'").fetchone() == (0,)


def test_no_function_that_carries_authority_is_within_reach(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        may = conn.execute(
            """SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = 'fencepost'::regnamespace
               AND has_function_privilege(p.oid, 'EXECUTE')"""
        ).fetchall()
        assert may == []
        assert conn.execute("SELECT count(*) FROM fencepost.installation").fetchone() == (1,)  # the control
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("UPDATE fencepost.job SET exec = 'queued'")


EXECUTION: LiteralString = """
SELECT (SELECT coalesce(jsonb_agg(to_jsonb(j) ORDER BY j.operation), '[]') FROM fencepost.job AS j),
       (SELECT coalesce(jsonb_agg(to_jsonb(e) ORDER BY e.operation), '[]') FROM fencepost.effect AS e),
       (SELECT count(*) FROM fencepost.reservation), (SELECT count(*) FROM fencepost.outbox)"""


def test_a_whole_history_of_effects_and_jobs_leaves_no_trace_when_it_is_replayed(
    roles: Roles, dsn: str, filled: Filled, request: pytest.FixtureRequest
) -> None:
    """Some of its operations have jobs: one waits, one has an effect that nobody knows the end of, one is done."""
    history = filled(*range(1, 20))
    tenant = request.node.callspec.id
    with roles.database.connect(autocommit=True) as conn:
        jobs.given(conn, "op-2", tenant=tenant)
        jobs.begun(conn, jobs.claimed(conn, "op-2").fence)
        jobs.given(conn, "op-3", tenant=tenant)
        publish(conn, jobs.claimed(conn, "op-3").fence, lambda tx: jobs.save(tx, "op-3", tenant=tenant))
        jobs.given(conn, "op-1", tenant=tenant)
        before = conn.execute(EXECUTION).fetchone()
    assert before is not None and {job["exec"] for job in before[0]} >= {"queued", "running", "done"} and before[1]

    assert replay(totals, dsn, history).applied == 19

    with roles.database.connect() as conn:
        assert conn.execute(EXECUTION).fetchone() == before
    assert seen(roles) == expected(range(1, 20))


def test_a_login_that_could_do_more_is_refused_before_the_first_event(roles: Roles, dsn: str, filled: Filled) -> None:
    history = filled(1)
    for login in (roles.login("executor").dsn, roles.login("projector", "relay").dsn, roles.database.dsn):
        with pytest.raises(ReplayRefused) as refused:
            replay(totals, login, history)
        assert refused.value.field == "login"
        assert roles.role("projector") in str(refused.value)
    assert replay(totals, dsn, history).swapped


def test_an_installation_without_roles_is_told_how_to_get_them(databases18: Databases) -> None:
    database = databases18.migrated()
    with pytest.raises(ReplayRefused, match="separate-roles"):
        replay(totals, database.dsn, OutboxHistory(database.dsn))
    databases18.drop(database)


def test_a_handler_that_swallows_an_error_or_ends_its_transaction_is_noticed(
    roles: Roles, dsn: str, filled: Filled
) -> None:
    def swallow(tx: Connection[Any], event: Paid) -> None:
        try:
            tx.execute(ATTEMPTS["submit"].encode())
        except psycopg.Error:
            pass

    def commit(tx: Connection[Any], event: Paid) -> None:
        tx.execute("COMMIT")

    def begin_again(tx: Connection[Any], event: Paid) -> None:
        tx.execute("ROLLBACK")
        tx.execute("BEGIN")

    history = filled(1)
    for handler in (swallow, commit, begin_again):
        made: Projection[Paid] = projection(name="totals", tables=("totals",))(handler)
        with pytest.raises((CommitWasRollback, ReplayRefused)):
            replay(made, dsn, history, restart=True)
    assert seen(roles) == {}
    assert replay(totals, dsn, filled(), restart=True).applied == 1


# Readers.


def test_readers_keep_their_rights_and_see_the_old_tables_or_the_new_ones(
    roles: Roles, dsn: str, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "GIVE_UP_SECONDS", 2.0)
    monkeypatch.setattr(shadow, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(shadow, "LOCK_TIMEOUT", "100ms")
    reader = roles.login("reader")
    with roles.database.connect(autocommit=True) as conn:
        conn.execute(
            f"GRANT SELECT ON totals TO {roles.name('reader')}; GRANT INSERT (account) ON totals TO PUBLIC".encode()
        )
        conn.execute("INSERT INTO totals VALUES ('old', 1, 1)")
        conn.execute("ALTER TABLE totals SET (fillfactor = 60)")
    history = filled(*range(1, 31))
    with reader.connect() as looking:
        assert rows(looking) == {"old": (1, 1)}
        with pytest.raises(ReplayRefused, match="in use all the time") as refused:
            replay(totals, dsn, history)
        assert refused.value.field == "tables"
        assert rows(looking) == {"old": (1, 1)}
        looking.rollback()
        assert replay(totals, dsn, filled()).swapped
        assert rows(looking) == expected(range(1, 31))
    with roles.database.connect() as conn:
        kept = conn.execute("SELECT has_column_privilege('public', 'public.totals', 'account', 'INSERT')").fetchone()
        indexes = conn.execute("SELECT count(*) FROM pg_indexes WHERE schemaname = 'public' AND tablename = 'totals'")
        assert kept == (True,) and indexes.fetchone() == (2,)
        assert conn.execute("SELECT reloptions FROM pg_class WHERE oid = 'totals'::regclass").fetchone() == (
            ["fillfactor=60"],
        )


@projection(name="pair", tables=("left_half", "right_half"))
def pair(tx: Connection[Any], event: Paid) -> None:
    tx.execute("INSERT INTO left_half VALUES (%(o)s)", {"o": event.operation})
    tx.execute("INSERT INTO right_half VALUES (%(o)s)", {"o": event.operation})


def make_pair(roles: Roles) -> None:
    with roles.database.connect(autocommit=True) as conn:
        conn.execute("DROP SCHEMA IF EXISTS pair_old, pair_shadow CASCADE")
        conn.execute("DROP TABLE IF EXISTS left_half, right_half, pair_replay, pair_newest, pair_held")
        for table in ("left_half", "right_half"):
            conn.execute(f"CREATE TABLE {table} (operation text PRIMARY KEY)".encode())
            conn.execute(f"ALTER TABLE {table} OWNER TO {roles.name('projector')}".encode())


def test_dropping_what_was_replaced_waits_for_a_late_reader_and_costs_it_no_deadlock(
    roles: Roles, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair(roles)
    with roles.database.connect() as conn:
        accept(conn, 1)
    ours = shadow.Shadow._ours  # pyright: ignore[reportPrivateUsage]
    asked = 0
    waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'DROP TABLE%'"
    with roles.database.connect() as late, roles.database.connect(autocommit=True) as look:

        def then_read(self: shadow.Shadow, schema: str) -> list[str]:
            nonlocal asked
            asked += schema == "pair_old"
            if asked == 2:  # The swap is committed, and what it replaced is about to go.
                late.execute("SELECT FROM pair_old.right_half")
            return ours(self, schema)

        monkeypatch.setattr(shadow.Shadow, "_ours", then_read)
        with ThreadPoolExecutor(1) as threads:
            replaying = threads.submit(replay, pair, dsn, OutboxHistory(dsn), drop_old=True)
            wait_for(lambda: look.execute(waiting).fetchone() == (True,), 20, "the drop to wait")
            with pytest.raises(psycopg.errors.UndefinedTable):
                late.execute("SELECT FROM pair_old.left_half")
            late.rollback()
            assert replaying.result(30).swapped
        gone = look.execute("SELECT to_regclass('pair_old.left_half'), to_regclass('pair_old.right_half')").fetchone()
    assert gone == (None, None)


@pytest.mark.parametrize("held", ["left_half", "right_half", "pair_replay", "pair_old.right_half"])
def test_a_reader_whose_deadlocks_are_looked_for_at_once_loses_none_to_a_swap(
    roles: Roles, dsn: str, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    make_pair(roles)
    with roles.database.connect() as conn:
        accept(conn, 1)
    assert replay(pair, dsn, OutboxHistory(dsn)).swapped  # the allowed control
    monkeypatch.setattr(shadow, "LOCK_TIMEOUT", "20s")
    waiting = """SELECT count(*) > 0 FROM pg_stat_activity
                 WHERE datname = current_database() AND wait_event_type = 'Lock'"""
    with roles.database.connect() as reader, roles.database.connect(autocommit=True) as look:
        reader.execute("SET deadlock_timeout = '50ms'")
        reader.execute(f"SELECT FROM {held}".encode())
        with ThreadPoolExecutor(1) as threads:
            replaying = threads.submit(replay, pair, dsn, OutboxHistory(dsn), drop_old=True)
            wait_for(lambda: look.execute(waiting).fetchone() == (True,), 20, "the swap to wait")
            for table in ("right_half", "left_half", "pair_replay", "pair_old.left_half"):
                reader.execute(f"SELECT FROM {table}".encode())
            reader.rollback()
            assert replaying.result(30).swapped


def test_no_reader_ever_sees_one_table_replaced_and_the_other_not(roles: Roles, dsn: str) -> None:
    seen_pairs: set[tuple[int, int]] = set()
    stop = threading.Event()
    failed: list[Exception] = []

    def look() -> None:
        order = ("left_half", "right_half"), ("right_half", "left_half")
        try:
            with roles.database.connect(autocommit=True) as conn:
                while not stop.is_set():
                    for one, other in order:
                        query = f"SELECT (SELECT count(*) FROM {one}), (SELECT count(*) FROM {other})"
                        seen_pairs.add(cast(tuple[int, int], conn.execute(query.encode()).fetchone()))
        except psycopg.Error as error:
            failed.append(error)

    make_pair(roles)
    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for n in range(1, 6):
            with roles.database.connect() as conn:
                accept(conn, n)
            assert replay(pair, dsn, OutboxHistory(dsn), drop_old=True).swapped
            wait_for(lambda n=n: (n, n) in seen_pairs or bool(failed), 10, "a reader to see the swap")  # type: ignore[misc]
    finally:
        stop.set()
        for reader in readers:
            reader.join(20)
    assert failed == []
    assert seen_pairs <= {(n, n) for n in range(6)} and len(seen_pairs) > 4


@pytest.mark.parametrize(
    ("hang", "named"),
    [
        ("CREATE VIEW rich AS SELECT * FROM totals WHERE amount > 5", "view rich"),
        ("CREATE TABLE notes (account text REFERENCES totals)", "foreign key notes_account_fkey"),
        ("ALTER TABLE totals ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON totals", "policy p"),
        ("ALTER TABLE totals ADD COLUMN n serial", "sequence totals_n_seq"),
    ],
)
def test_what_a_swap_would_lose_is_refused_by_name_before_anything_is_built(
    roles: Roles, dsn: str, filled: Filled, hang: str, named: str
) -> None:
    with roles.database.connect(autocommit=True) as conn:
        conn.execute(hang.encode())
    try:
        with pytest.raises(ReplayRefused) as refused:
            replay(totals, dsn, filled(1))
        assert named in str(refused.value)
        with roles.database.connect() as conn:
            assert conn.execute("SELECT to_regclass('totals_shadow.totals')").fetchone() == (None,)
    finally:
        with roles.database.connect(autocommit=True) as conn:
            conn.execute("DROP VIEW IF EXISTS rich; DROP TABLE IF EXISTS notes")


def test_a_projection_is_checked_when_it_is_declared() -> None:
    def handler(tx: Connection[Any], event: Paid) -> None: ...

    async def coroutine(tx: Connection[Any], event: Paid) -> None: ...

    projection(name="totals", tables=("totals",))(handler)
    for arguments, field in (
        ({"name": "Bad", "tables": ("t",)}, "name"),
        ({"name": "ok", "tables": ()}, "tables"),
        ({"name": "ok", "tables": ("t", "t")}, "tables"),
        ({"name": "ok", "tables": ("t;",)}, "tables"),
        ({"name": "ok", "tables": ("t",), "schema": "a.b"}, "schema"),
    ):
        with pytest.raises(ConfigError) as refused:
            projection(**arguments)(handler)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(ConfigError, match="coroutine"):
        projection(name="totals", tables=("totals",))(coroutine)


# A crash.

PATH = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *(str(ROOT / name) for name in ("tests", "compose"))])
CHILD = """
import sys, threading
from fencepost.consumer import kafka_history, outbox_history
from fencepost.consumer.kafka_history import KafkaHistory
from fencepost.consumer.outbox_history import OutboxHistory
from fencepost.consumer.replay import replay
from support.projections import totals
kafka_history.BATCH = outbox_history.WINDOW = 25
kind, dsn, last, *where = sys.argv[1:]
def told(progress):
    if progress.read > int(last):
        threading.Event().wait()
history = KafkaHistory(*where) if kind == "kafka" else OutboxHistory(dsn)
print(replay(totals, dsn, history, told=told))
"""


@pytest.mark.parametrize("kind", ["kafka", "outbox"])
def test_killed_in_the_middle_it_goes_on_and_every_event_counts_once(
    roles: Roles, dsn: str, kafka: Kafka, kind: str, tmp_path: Path
) -> None:
    """P1: kill -9 while batches are under way, several times."""
    number = 2000
    topic = kafka.topic()
    if kind == "kafka":
        produce(kafka.bootstrap, topic, [sent(n) for n in range(1, number + 1)])
    else:
        with roles.database.connect() as conn:
            accept(conn, *range(1, number + 1))
    gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = %s"
    login = conninfo_to_dict(dsn)["user"]
    position = "SELECT coalesce(sum(position - first), 0) FROM totals_shadow.totals_replay"
    with roles.database.connect(autocommit=True) as conn:
        at = 0
        for last in (500, 1000, 1500):
            arguments = (kind, dsn, str(last), kafka.bootstrap, topic)
            with Child.script(CHILD, folder=tmp_path, arguments=arguments, PYTHONPATH=PATH) as child:

                def moved(since: int = at) -> int | None:
                    if conn.execute("SELECT to_regclass('totals_shadow.totals_replay')").fetchone() == (None,):
                        return None
                    row = conn.execute(position.encode()).fetchone()
                    return int(row[0]) if row and row[0] > since else None

                at = wait_for(moved, 30, "the position to move")
                child.kill()
            wait_for(lambda: conn.execute(gone, (login,)).fetchone() == (True,), 30, "its sessions to end")
        assert 0 < at < number, "killed in the middle"
        assert rows(conn) == {}
    done = replay(totals, dsn, KafkaHistory(kafka.bootstrap, topic) if kind == "kafka" else OutboxHistory(dsn))
    assert (done.applied, done.older, done.swapped) == (number, 0, True)
    assert seen(roles) == expected(range(1, number + 1))


def test_two_replays_of_one_projection_never_count_an_event_twice(
    roles: Roles, dsn: str, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, other = filled(*range(1, 11)), filled()
    stop = threading.Event()
    stop.set()
    assert not replay(totals, dsn, history, stop=stop).complete
    inner: list[Progress] = []

    def meanwhile(progress: Progress) -> None:
        if not inner and progress.read == 0:
            inner.append(progress)
            never = threading.Event()
            inner.append(replay(totals, dsn, other, stop=never))

    with pytest.raises((ReplayRefused, psycopg.errors.UndefinedTable)):
        replay(totals, dsn, filled(), told=meanwhile)
    assert inner[1].swapped
    assert seen(roles) == expected(range(1, 11))
