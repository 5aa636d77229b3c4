"""What this installation accepted before a rotation is not handled after it until an authority admin says so, and then once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest
from psycopg import Connection, IsolationLevel

from fencepost.consumer import acts
from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.outcomes import Handled, Outcome, Reserved, Unhandled
from fencepost.consumer.reservation import reserve_in
from fencepost.consumer.runner import Handling, RunnerOptions, Tries
from fencepost.jobs.authority import By, rotate
from fencepost.jobs.recovery import holds
from fencepost.relay.destination import source
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import InvalidInput, NotArmed
from support.database import Database, Databases
from support.deliveries import Submitted, envelope, from_kafka, from_rabbitmq
from support.processes import wait_for
from support.roles import separated

DEADLINE_SECONDS = 20.0
ONCE = RunnerOptions(max_attempts=1)
BY = By("ann", "a test", "ticket 7")
LETTERS: LiteralString = """
SELECT reason, field, tenant, operation, attempts, due_at IS NOT NULL FROM fencepost.dead_letter ORDER BY id"""
DECISIONS: LiteralString = """
SELECT kind, actor, reason, tenant, operation, verdict, evidence_kind, login FROM fencepost.decision
WHERE subject = 'dead letter ' || %(id)s::bigint ORDER BY id"""
WAITED: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%fencepost.reserve%%'
  AND clock_timestamp() > query_start + interval '20 ms'"""


def write(tx: Connection[Any], event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


reports: Inbox[Any] = inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)(write)


class Installation:
    """Events as this installation's relay sends them, rotations, and what has become of it all."""

    def __init__(self, database: Database) -> None:
        self.database = database
        with database.connect() as conn:
            self.source = source(conn)

    def epoch(self, tenant: str) -> int:
        return int(self.rows("SELECT fencepost._epoch(%(tenant)s)", {"tenant": tenant})[0][0])

    def accepted(self, tenant: str, operation: str = "op-1", document: str = "a", **changes: Any) -> Envelope:
        """An event that is accepted now."""
        event = Submitted(tenant=tenant, operation=operation, document=document, ordering_key=f"{tenant} {operation}")
        made = envelope(event, epoch=self.epoch(tenant), time=datetime.now(UTC))
        return replace(made, source=self.source, **changes)

    def rotate(self, tenant: str | None) -> None:
        rotate(self.database.dsn, self.database.state, BY, tenant=tenant)

    def rows(self, query: LiteralString, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        with self.database.connect() as conn:
            return conn.execute(query, values).fetchall()

    def letters(self) -> list[tuple[Any, ...]]:
        return self.rows(LETTERS)

    def reasons(self) -> list[tuple[str, bool]]:
        """Of each letter its reason, and whether it is due."""
        return [(row[0], row[5]) for row in self.letters()]

    def letter(self) -> int:
        """The number of the only letter."""
        ((number,),) = self.rows("SELECT id FROM fencepost.dead_letter")
        return int(number)

    def done(self) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in self.rows("SELECT tenant, operation FROM done ORDER BY n")]

    def release(self, number: int | None = None) -> int:
        number = number or self.letter()
        with self.database.connect() as conn:
            acts.release(conn, number, actor="ann", reason="looked into it")
        return number


@pytest.fixture
def here(domain18: Database) -> Installation:
    return Installation(domain18)


Feed = Callable[..., list[Outcome]]


@pytest.fixture(params=["alone", "batch"])
def feed(request: pytest.FixtureRequest, here: Installation) -> Feed:
    """Delivers events at coordinates of their own, each alone or all in one batch."""
    offset = 0

    def deliver(*sent: Envelope, handler: Inbox[Any] = reports) -> list[Outcome]:
        nonlocal offset
        deliveries = [from_kafka(each, offset + n) for n, each in enumerate(sent)]
        offset += len(sent)
        found: list[Handled | Unhandled] = (
            handler.handle_many(here.database.dsn, deliveries)
            if request.param == "batch"
            else [handler.handle(here.database.dsn, each) for each in deliveries]
        )
        assert all(isinstance(each, Handled) and each.arrivals == 1 for each in found)
        return [each.outcome for each in found if isinstance(each, Handled)]

    return deliver


@pytest.fixture
def handling(here: Installation) -> Iterator[Handling]:
    made = Handling(reports, here.database.dsn, ONCE)
    yield made
    made.close()


def refused(here: Installation, number: int, act: Callable[..., None] = acts.release) -> str | None:
    with here.database.connect() as conn, pytest.raises(InvalidInput) as error:
        act(conn, number, actor="ann", reason="why")
    return error.value.field


def test_what_was_accepted_before_a_rotation_is_set_aside_and_what_comes_after_it_is_handled(
    here: Installation, feed: Feed
) -> None:
    early, late = here.accepted("turned"), here.accepted("turned", "op-2")
    assert feed(early) == [Outcome.HANDLED], "the control: its epoch is the present one"

    here.rotate("turned")

    assert feed(late, here.accepted("turned", "op-3")) == [Outcome.OLD_EPOCH, Outcome.HANDLED]
    assert here.letters() == [("old_epoch", "epoch", "turned", "op-2", 1, False)]
    assert here.rows("SELECT event_id, arrived_meaning, stored_meaning, detail FROM fencepost.dead_letter") == [
        (
            late.id,
            late.meaning.raw,
            None,
            f"accepted here under epoch {late.epoch}, and the tenant stands at epoch {here.epoch('turned')}",
        )
    ]
    assert here.done() == [("turned", "op-1"), ("turned", "op-3")]
    assert here.rows("SELECT operation FROM fencepost.reservation ORDER BY 1") == [("op-1",), ("op-3",)]


def test_one_delivery_that_comes_again_and_again_is_one_letter(here: Installation) -> None:
    old = here.accepted("again")
    here.rotate("again")
    for arrivals in (1, 2, 3):
        told = reports.handle(here.database.dsn, from_kafka(old))
        assert (told.outcome, told.arrivals) == (Outcome.OLD_EPOCH, arrivals)
    assert here.letters() == [("old_epoch", "epoch", "again", "op-1", 3, False)]


def test_the_epoch_of_another_installation_is_data(here: Installation, feed: Feed) -> None:
    old = here.accepted("data")
    here.rotate("data")
    foreign = [
        replace(envelope(Submitted(tenant="data", operation=f"op-{n}", document="a"), epoch=epoch), source=where)
        for n, (epoch, where) in enumerate(
            [
                (old.epoch, "urn:fencepost:00000000-0000-0000-0000-000000000000"),
                (old.epoch, here.source + "0"),
                (0, here.source.removeprefix("urn:fencepost:")),
                (0, "urn:someone"),
            ],
            start=2,
        )
    ]
    assert feed(old, *foreign) == [Outcome.OLD_EPOCH, *[Outcome.HANDLED] * 4]
    assert len(here.letters()) == 1


def test_a_rotation_of_one_tenant_is_no_other_tenants_and_one_of_everybody_is(here: Installation, feed: Feed) -> None:
    mine, theirs = here.accepted("mine"), here.accepted("theirs")
    here.rotate("mine")
    assert feed(mine, theirs) == [Outcome.OLD_EPOCH, Outcome.HANDLED]
    mine, theirs, newcomer = here.accepted("mine", "op-2"), here.accepted("theirs", "op-2"), here.accepted("newcomer")
    assert mine.epoch > theirs.epoch == newcomer.epoch, "one has an epoch of its own, two stand at the floor"

    here.rotate(None)

    assert feed(mine, theirs, newcomer) == [Outcome.OLD_EPOCH] * 3
    now = [here.accepted(tenant, "op-3") for tenant in ("mine", "theirs", "newcomer", "never seen")]
    assert feed(*now) == [Outcome.HANDLED] * 4


def test_what_was_handled_before_stays_a_duplicate_or_a_conflict_whatever_its_epoch(
    here: Installation, feed: Feed
) -> None:
    known, other = here.accepted("known"), here.accepted("known", document="b")
    assert feed(known) == [Outcome.HANDLED]
    here.rotate("known")
    assert feed(known, here.accepted("known", "op-2")) == [Outcome.DUPLICATE, Outcome.HANDLED]
    assert here.letters() == []
    assert feed(here.accepted("known")) == [Outcome.DUPLICATE], "the same meaning, accepted under another epoch"
    assert feed(other) == [Outcome.CONFLICT]
    assert here.reasons() == [("conflict", False)]
    assert len(here.done()) == 2


def test_a_released_letter_is_handled_once_and_the_decision_stays(here: Installation, handling: Handling) -> None:
    old = here.accepted("released")
    here.rotate("released")
    told = handling.attempt(from_kafka(old), Tries(ONCE))
    assert isinstance(told, Handled) and told.outcome is Outcome.OLD_EPOCH
    assert not handling.retry(), "nobody has released it"

    number = here.release()
    assert here.release() == number, "said twice, it is still one letter"
    assert here.reasons() == [("old_epoch", True)]
    assert handling.retry()

    assert (here.done(), here.letters()) == ([("released", "op-1")], [])
    assert not handling.retry()
    assert reports.handle(here.database.dsn, from_kafka(old)).outcome is Outcome.DUPLICATE
    assert refused(here, number) == "id", "it is handled: there is nothing left to release"
    assert [row[:7] for row in here.rows(DECISIONS, {"id": number})] == [
        (
            *("release_dead_letter", "ann", "looked into it", "released", "op-1"),
            f"released under epoch {here.epoch('released')}",
            "old_epoch",
        )
    ] * 2


def test_a_redelivery_beside_a_released_letter_is_the_same_one_handling(here: Installation) -> None:
    old = here.accepted("twice")
    here.rotate("twice")
    reports.handle(here.database.dsn, from_rabbitmq(old))
    here.release()
    made = Handling(reports, here.database.dsn, ONCE)
    with ThreadPoolExecutor(2) as threads:
        retried = threads.submit(made.retry)
        again = threads.submit(reports.handle, here.database.dsn, from_rabbitmq(old))
        assert retried.result(DEADLINE_SECONDS)
        assert again.result(DEADLINE_SECONDS).outcome in (Outcome.HANDLED, Outcome.DUPLICATE)
    while made.retry():
        pass
    made.close()
    assert (here.done(), here.letters()) == ([("twice", "op-1")], [])


def test_a_release_is_of_one_delivery_and_no_other(here: Installation, feed: Feed) -> None:
    old = here.accepted("one")
    neighbour, another_meaning = here.accepted("one", "op-2"), here.accepted("one", document="b")
    here.rotate("one")
    assert reports.handle(here.database.dsn, from_rabbitmq(old, "a")).outcome is Outcome.OLD_EPOCH
    here.release()

    assert feed(old, neighbour) == [Outcome.OLD_EPOCH] * 2, "at other coordinates"
    another = replace(old, id=UUID(int=7))
    assert reports.handle(here.database.dsn, from_rabbitmq(another, "a")).outcome is Outcome.OLD_EPOCH
    elsewhere: Inbox[Any] = inbox(consumer="other")(write)
    assert elsewhere.handle(here.database.dsn, from_rabbitmq(old, "a")).outcome is Outcome.OLD_EPOCH
    with here.database.connect() as conn:
        # As a purge may have left it: nobody sees that it has changed.
        conn.execute("DELETE FROM fencepost.unreserved_delivery")
    changed = replace(another_meaning, id=old.id)
    assert reports.handle(here.database.dsn, from_rabbitmq(changed, "a")).outcome is Outcome.OLD_EPOCH
    assert here.done() == []
    with here.database.connect() as conn:
        conn.execute("DELETE FROM fencepost.unreserved_delivery")
    assert reports.handle(here.database.dsn, from_rabbitmq(old, "a")).outcome is Outcome.HANDLED, "the one"


def test_a_rotation_after_the_release_holds_it_again(here: Installation, handling: Handling) -> None:
    old = here.accepted("between")
    here.rotate("between")
    handling.attempt(from_kafka(old), Tries(ONCE))
    here.release()
    here.rotate("bystander")
    here.rotate("between")

    assert handling.retry()
    assert here.letters() == [("old_epoch", "epoch", "between", "op-1", 2, False)]
    assert not handling.retry() and here.done() == []

    here.release()
    here.rotate("bystander")
    assert handling.retry(), "another tenant's rotation takes nothing back"
    assert (here.letters(), here.done()) == ([], [("between", "op-1")])


def test_a_released_letter_whose_handler_fails_needs_a_retry_and_after_a_rotation_a_release(here: Installation) -> None:
    mended = False

    @inbox(consumer="reports")
    def fragile(tx: Connection[Any], event: Submitted) -> None:
        if not mended:
            raise ValueError
        write(tx, event)

    handling = Handling(fragile, here.database.dsn, ONCE)
    old, second = here.accepted("fails"), here.accepted("fails", "op-2")
    here.rotate("fails")
    for offset, each in enumerate((old, second)):
        handling.attempt(from_kafka(each, offset), Tries(ONCE))
        here.release(int(here.rows("SELECT max(id) FROM fencepost.dead_letter")[0][0]))
        assert handling.retry()
    assert here.reasons() == [("handler_failed", False)] * 2
    first, other = (int(row[0]) for row in here.rows("SELECT id FROM fencepost.dead_letter ORDER BY operation"))
    mended = True

    with here.database.connect() as conn:
        acts.retry(conn, first, actor="ann", reason="mended")
    assert handling.retry()
    assert (here.done(), here.reasons()) == ([("fails", "op-1")], [("handler_failed", False)])

    here.rotate("fails")
    with here.database.connect() as conn:
        acts.retry(conn, other, actor="ann", reason="mended")
    assert handling.retry()
    assert (len(here.done()), here.reasons()) == (1, [("old_epoch", False)])
    here.release()
    assert handling.retry()
    handling.close()
    assert (len(here.done()), here.letters()) == (2, [])


def test_a_letter_is_released_and_nothing_else_makes_it_due(here: Installation, handling: Handling) -> None:
    old = here.accepted("refusals")
    here.rotate("refusals")
    handling.attempt(from_kafka(old), Tries(ONCE))
    number = here.letter()
    assert refused(here, number, acts.retry) == "epoch"
    with here.database.connect() as conn, pytest.raises(InvalidInput) as error:
        acts.retry(conn, number, actor="ann", reason="why", unhandled=True)
    assert error.value.field == "epoch" and "authority admin" in (error.value.hint or "")
    assert here.reasons() == [("old_epoch", False)]
    for actor, reason, field in (("", "why", "actor"), ("ann", "", "reason")):
        with here.database.connect() as conn, pytest.raises(InvalidInput) as error:
            acts.release(conn, number, actor=actor, reason=reason)
        assert error.value.field == field

    handling.attempt(from_kafka(here.accepted("refusals", "op-2"), 1, payload=b"nonsense"), Tries(ONCE))
    undecodable = int(here.rows("SELECT max(id) FROM fencepost.dead_letter")[0][0])
    assert refused(here, undecodable) == "epoch", "it was set aside for something else"

    with here.database.connect() as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
        with pytest.raises(NotArmed):
            acts.release(conn, number, actor="ann", reason="disarmed")
        conn.rollback()
    here.release(number)


def test_only_an_authority_admin_releases(databases18: Databases) -> None:
    with separated(databases18) as made:
        with made.database.connect() as conn:
            conn.execute("CREATE TABLE done (tenant text, operation text, n int GENERATED ALWAYS AS IDENTITY)")
            conn.execute(f"GRANT INSERT ON done TO {made.role('consumer')}".encode())
        here = Installation(made.database)
        consumer = made.login("consumer")
        old, control = here.accepted("acme"), here.accepted("acme", "op-2")
        assert reports.handle(consumer.dsn, from_kafka(control, 1)).outcome is Outcome.HANDLED
        here.rotate("acme")
        handling = Handling(reports, consumer.dsn, ONCE)
        handling.attempt(from_kafka(old), Tries(ONCE))
        number = here.letter()

        admin = made.login("authority_admin")
        with admin.connect() as conn, conn.transaction(force_rollback=True):
            acts.release(conn, number, actor="ann", reason="the control")
        for role in ("consumer", "reconciler", "producer", "executor", "relay", "maintenance", "reader", "armer"):
            with made.login(role).connect() as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
                acts.release(conn, number, actor="ann", reason="why")
        with made.login("reconciler").connect() as conn, pytest.raises(InvalidInput) as error:
            acts.retry(conn, number, actor="ann", reason="why")
        assert error.value.field == "epoch"
        assert not handling.retry() and len(here.done()) == 1

        with admin.connect() as conn:
            acts.release(conn, number, actor="ann", reason="why")
            shown = conn.execute("SELECT reason FROM fencepost.dead_letters").fetchall()
        assert shown == [("old_epoch",)]
        assert handling.retry()
        handling.close()
        assert here.done() == [("acme", "op-2"), ("acme", "op-1")]
        assert [(row[0], row[7]) for row in here.rows(DECISIONS, {"id": number})] == [
            ("release_dead_letter", made.name("authority_admin"))
        ]


def test_who_owns_the_transaction_is_told_and_a_release_lets_the_next_delivery_in(here: Installation) -> None:
    old = here.accepted("caller")
    here.rotate("caller")
    with here.database.connect() as conn:
        assert reserve_in(conn, "reports", old, "[1]").outcome is Reserved.OLD_EPOCH
    here.release()
    assert here.reasons() == [("old_epoch", False)], "no runner has it to take"
    with here.database.connect() as conn:
        assert reserve_in(conn, "reports", old, "[1]").outcome is Reserved.RESERVED
        assert reserve_in(conn, "reports", old, "[1]").outcome is Reserved.DUPLICATE


def test_an_old_epoch_and_a_horizon_need_a_word_each(here: Installation, handling: Handling) -> None:
    old = here.accepted("both", time=datetime.now(UTC) - timedelta(days=30))
    here.rotate("both")
    with here.database.connect() as conn:
        conn.execute("INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', now() - interval '7 days')")
    handling.attempt(from_kafka(old), Tries(ONCE))
    assert here.reasons() == [("old_epoch", False)]
    here.release()
    assert handling.retry()
    assert here.reasons() == [("before_horizon", False)]
    with here.database.connect() as conn:
        acts.retry(conn, here.letter(), actor="ann", reason="it was missed", unhandled=True)
    assert handling.retry()
    assert (here.letters(), here.done()) == ([], [("both", "op-1")])


def test_what_reserved_before_the_rotation_commits_after_it_and_counts(here: Installation) -> None:
    old = here.accepted("under way")
    with here.database.connect() as conn:
        assert reserve_in(conn, "reports", old, "[1]").outcome is Reserved.RESERVED
        here.rotate("under way")  # It waits for nobody's handler.
        write(conn, Submitted(tenant="under way", operation="op-1", document="a"))
    assert here.done() == [("under way", "op-1")]
    assert reports.handle(here.database.dsn, from_kafka(old)).outcome is Outcome.DUPLICATE


@pytest.mark.parametrize("turned", [False, True], ids=["no rotation", "rotation"])
def test_a_copy_that_waited_across_a_rotation_compares_again(here: Installation, feed: Feed, turned: bool) -> None:
    tenant = "waits turned" if turned else "waits"
    old, beside = here.accepted(tenant), here.accepted(tenant, "op-2")
    with ThreadPoolExecutor(1) as threads, here.database.connect() as first:
        assert reserve_in(first, "reports", old, "[1]").outcome is Reserved.RESERVED
        copy = threads.submit(feed, old, beside)
        with here.database.connect(autocommit=True) as conn:
            wait_for(lambda: conn.execute(WAITED).fetchall()[0][0] == 1, DEADLINE_SECONDS, "the copy to wait")
        if turned:
            here.rotate(tenant)
        first.rollback()
        outcomes = copy.result(DEADLINE_SECONDS)
    assert outcomes == ([Outcome.OLD_EPOCH] * 2 if turned else [Outcome.HANDLED] * 2)
    assert len(here.rows("SELECT FROM fencepost.reservation")) == len(here.done()) == (0 if turned else 2)


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "another installation's"])
def test_a_copy_that_waited_with_its_content_in_hand_compares_again_if_it_is_from_here(
    here: Installation, foreign: bool
) -> None:
    tenant = f"content {foreign}"
    old = here.accepted(tenant)
    old = replace(old, source="urn:fencepost:another") if foreign else old
    values = {"tenant": tenant, "event_id": old.id, "source": old.source, "epoch": old.epoch, "binding": old.check()}

    def arrives() -> list[tuple[Any, ...]]:
        return here.rows(WITH_CONTENT, values)

    with ThreadPoolExecutor(1) as threads, here.database.connect() as first:
        assert reserve_in(first, "reports", old, "[1]").outcome is Reserved.RESERVED
        copy = threads.submit(arrives)
        with here.database.connect(autocommit=True) as conn:
            wait_for(lambda: conn.execute(WAITED).fetchall()[0][0] == 1, DEADLINE_SECONDS, "the copy to wait")
        here.rotate(tenant)
        first.rollback()
        assert copy.result(DEADLINE_SECONDS) == [("reserved" if foreign else "old_epoch",)]
    assert [row[0] for row in here.letters()] == ([] if foreign else ["old_epoch"])


def test_a_copy_of_what_is_being_handled_waits_and_is_no_letter(here: Installation, feed: Feed) -> None:
    old = here.accepted("copy")
    with ThreadPoolExecutor(1) as threads, here.database.connect() as first:
        assert reserve_in(first, "reports", old, "[1]").outcome is Reserved.RESERVED
        here.rotate("copy")
        copy = threads.submit(feed, old)
        with here.database.connect(autocommit=True) as conn:
            wait_for(lambda: conn.execute(WAITED).fetchall()[0][0] == 1, DEADLINE_SECONDS, "the copy to wait")
        first.commit()
        assert copy.result(DEADLINE_SECONDS) == [Outcome.DUPLICATE]
    assert here.letters() == []


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
@pytest.mark.parametrize("whose", ["a tenant", "everybody"])
def test_an_old_snapshot_never_reads_an_old_epoch(here: Installation, level: IsolationLevel, whose: str) -> None:
    tenant = f"snapshot {level.name} {whose}"
    old, foreign = here.accepted(tenant), envelope(Submitted(tenant=tenant, operation="op-2", document="a"), epoch=0)
    many: dict[str, Any] = {
        "types": [old.type],
        "binding": [old.check()],
        "tenants": [tenant],
        "source": [old.source],
        "epoch": [old.epoch],
    }
    with here.database.connect() as conn:
        conn.isolation_level = level
        conn.execute("SELECT 1 FROM done")  # The snapshot.
        with conn.transaction(force_rollback=True):
            assert reserve_in(conn, "reports", old, "[1]").outcome is Reserved.RESERVED
        with conn.transaction(force_rollback=True):
            assert conn.execute(MANY, many).fetchall() == [("reserved",)]
        here.rotate(tenant if whose == "a tenant" else None)
        with conn.transaction(force_rollback=True):
            assert reserve_in(conn, "reports", foreign, "[2]").outcome is Reserved.RESERVED
        with pytest.raises(psycopg.errors.SerializationFailure):
            reserve_in(conn, "reports", old, "[1]")
        conn.rollback()
        conn.execute("SELECT 1 FROM done")
        assert reserve_in(conn, "reports", old, "[1]").outcome is Reserved.OLD_EPOCH
        assert reserve_in(conn, "reports", foreign, "[2]").outcome is Reserved.RESERVED
        assert conn.execute(MANY, many).fetchall() == [("alone",)]
        conn.rollback()
        conn.execute("SELECT 1 FROM done")
        here.rotate(tenant)
        with pytest.raises(psycopg.errors.SerializationFailure):
            conn.execute(MANY, many)
        conn.rollback()


WITH_CONTENT: LiteralString = """
SELECT outcome FROM fencepost.reserve(%(tenant)s, 'reports', 'op-1', 'test.submitted', 1, %(event_id)s, %(source)s, %(epoch)s,
    %(binding)s, now(), '[2]', '[]', '{}')"""
MANY: LiteralString = """
SELECT outcome FROM fencepost.reserve_many('reports', %(tenants)s, ARRAY['op-1'], %(types)s, ARRAY[1], ARRAY[gen_random_uuid()],
    %(source)s, %(epoch)s::bigint[], %(binding)s, ARRAY[now()], ARRAY['[9]'])"""


def test_what_waits_for_the_authority_admin_is_among_the_holds(here: Installation) -> None:
    old = here.accepted("held")
    here.rotate("held")
    reports.handle(here.database.dsn, from_kafka(old))

    def held() -> list[tuple[str, int]]:
        with here.database.connect() as conn:
            return [(h.owner, h.count) for h in holds(conn) if h.what == "event of an old epoch" and h.tenant == "held"]

    assert held() == [("authority admin", 1)]
    here.release()
    assert held() == []
