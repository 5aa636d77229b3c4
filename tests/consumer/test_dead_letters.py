"""A dead letter that an operator gives back is handled once or kept, and nobody sees what is in it by the way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, LiteralString

import pytest
from psycopg import AsyncConnection, Connection
from psycopg.rows import dict_row

from fencepost.consumer import acts
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.outcomes import Handled, Outcome
from fencepost.consumer.retries import TAKES_MAX, take
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries
from fencepost.schemas.errors import InvalidInput, NotArmed
from support.database import Database
from support.deliveries import Submitted, Withdrawn, envelope, from_kafka, from_rabbitmq
from support.processes import wait_for

Tx = Connection[Any]
DEADLINE_SECONDS = 20.0
ONCE = RunnerOptions(max_attempts=1, concurrency=2)
SECRET = "canary-content"
LETTERS: LiteralString = "SELECT * FROM fencepost.dead_letter ORDER BY id"
WAITING: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE %(query)s"""


class Fragile:
    """A handler that fails until it is mended."""

    def __init__(self) -> None:
        self.mended = False
        self.runs = 0

    def __call__(self, tx: Tx, event: Submitted) -> None:
        self.runs += 1
        tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
        if not self.mended:
            raise ValueError(event.document)


@pytest.fixture
def fragile() -> Fragile:
    return Fragile()


@pytest.fixture
def handling(domain: Database, fragile: Fragile) -> Iterator[Handling]:
    made = Handling(of(fragile), domain.dsn, ONCE)
    yield made
    made.close()


def of(fragile: Fragile) -> Inbox[Any]:
    return inbox(consumer="reports")(fragile.__call__)


def letters(database: Database) -> list[dict[str, Any]]:
    with database.connect() as conn, conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(LETTERS).fetchall()


def told(database: Database) -> list[tuple[str, int, bool]]:
    return [(each["reason"], each["attempts"], each["due_at"] is not None) for each in letters(database)]


def done(database: Database) -> int:
    with database.connect() as conn:
        return int(conn.execute("SELECT count(*) FROM done").fetchall()[0][0])


def attempt(handling: Handling, delivery: Delivery) -> Outcome:
    result = handling.attempt(delivery, Tries(ONCE))
    assert isinstance(result, Handled)
    return result.outcome


def give_back(database: Database, number: int | None = None) -> int:
    number = number or int(letters(database)[0]["id"])
    with database.connect() as conn:
        acts.retry(conn, number, actor="ann", reason="mended")
    return number


KEPT: list[Delivery] = [
    from_kafka(envelope()),
    from_rabbitmq(envelope()),
    Delivery.from_kafka(
        cluster_id="c", topic="t", partition=0, offset=1, key=b"\xff\x00", value=None,
        headers=[("a", b"\xfe"), ("a", None), ("", b""), ("nul", b"a\0b"), ("text", "ü")],
    ),
    Delivery.from_kafka(cluster_id="c", topic="t", partition=0, offset=2, key=None, value=b"\0\xff", headers=None),
    Delivery.from_rabbitmq(
        cluster="c", vhost="/", queue="q", message_id="m", content_type="text/plain", body=b"x",
        headers={"n": 1, "b": True, "none": None, "list": [1, b"\xff", {"k": "v\0"}], "map": {"a": [b"b"]}, "f": 1.5, "s": "\ud800"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("delivery", KEPT)
def test_what_is_kept_becomes_the_same_delivery_again(delivery: Delivery) -> None:
    kept = json.loads(json.dumps(delivery.stored_headers()))

    again = Delivery.from_dead_letter(7, delivery.coordinates, kept, delivery.body)

    assert json.loads(json.dumps(again.stored_headers())) == kept
    assert (again.broker, again.coordinates, again.body, again.dead_letter) == (
        delivery.broker,
        delivery.coordinates,
        delivery.body,
        7,
    )
    assert (again.key, again.content_type) == (delivery.key, delivery.content_type)
    assert SECRET not in repr(again)


@pytest.mark.parametrize("delivery", KEPT[:2], ids=["kafka", "rabbitmq"])
def test_what_is_kept_has_its_envelope_again(delivery: Delivery) -> None:
    again = Delivery.from_dead_letter(7, delivery.coordinates, delivery.stored_headers(), delivery.body)
    assert again.envelope() == delivery.envelope()


def test_a_failed_delivery_is_handled_once_after_it_was_given_back_and_the_letter_goes_with_the_commit(
    domain: Database, handling: Handling, fragile: Fragile, caplog: pytest.LogCaptureFixture
) -> None:
    sent = from_kafka(envelope(document=SECRET))
    with caplog.at_level("DEBUG"):
        assert attempt(handling, sent) is Outcome.HANDLER_FAILED
        assert not handling.retry(), "nobody has given it back"
        (letter,) = letters(domain)
        assert letter["arrived_meaning"] == envelope(document=SECRET).meaning.raw
        give_back(domain)
        fragile.mended = True

        assert handling.retry()

        assert (letters(domain), done(domain), fragile.runs) == ([], 1, 2)
        assert not handling.retry()
        assert attempt(handling, sent) is Outcome.DUPLICATE
    assert SECRET not in caplog.text
    with domain.connect() as conn:
        decided = conn.execute(
            "SELECT kind, actor, reason, tenant, operation, verdict, evidence_kind FROM fencepost.decision WHERE subject = %s",
            (f"dead letter {letter['id']}",),
        ).fetchall()
    assert decided == [("retry_dead_letter", "ann", "mended", "acme", "op-1", "due", "handler_failed")]


def test_a_delivery_that_fails_again_is_kept_counted_and_not_due(
    domain: Database, handling: Handling, fragile: Fragile
) -> None:
    attempt(handling, from_kafka(envelope()))
    give_back(domain)
    assert handling.retry()
    assert told(domain) == [("handler_failed", 2, False)]
    assert (done(domain), fragile.runs) == (0, 2)
    assert not handling.retry(), "one word of an operator is one try"


def test_a_conflict_stays_a_conflict(domain: Database, handling: Handling, fragile: Fragile) -> None:
    fragile.mended = True
    assert attempt(handling, from_kafka(envelope())) is Outcome.HANDLED
    assert attempt(handling, from_kafka(envelope(document="b"), 1)) is Outcome.CONFLICT
    assert attempt(handling, from_kafka(envelope(document="c"), 0)) is Outcome.CONFLICT
    for letter in letters(domain):
        give_back(domain, letter["id"])
    assert handling.retry() and handling.retry() and not handling.retry()
    assert told(domain) == [("conflict", 2, False), ("delivery_changed", 2, False)]
    assert all(each["stored_meaning"] != each["arrived_meaning"] for each in letters(domain))
    assert done(domain) == 1


def test_a_letter_becomes_what_its_retry_makes_of_it(domain: Database, handling: Handling, fragile: Fragile) -> None:
    withdrawn = envelope(Withdrawn(tenant="acme", operation="op-2"))
    assert attempt(handling, from_kafka(withdrawn)) is Outcome.UNDECODABLE
    assert attempt(handling, from_kafka(envelope(version=2), 1)) is Outcome.UNDECODABLE
    assert attempt(handling, from_kafka(envelope(), 2, payload=b"nonsense")) is Outcome.UNDECODABLE
    assert [each[0] for each in told(domain)] == ["unknown_type", "newer_version", "undecodable"]
    give_back(domain)

    def failing(tx: Tx, event: Withdrawn) -> None:
        raise ValueError

    upgraded = Handling(inbox(consumer="reports")(failing), domain.dsn, ONCE)
    assert upgraded.retry()
    assert [(each["reason"], each["attempts"]) for each in letters(domain)][-1] == ("handler_failed", 2)
    assert [each[0] for each in told(domain)] == ["newer_version", "undecodable", "handler_failed"]
    upgraded.close()

    def working(tx: Tx, event: Withdrawn) -> None:
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    give_back(domain, letters(domain)[-1]["id"])
    mended = Handling(inbox(consumer="reports")(working), domain.dsn, ONCE)
    assert mended.retry()
    mended.close()
    assert [each[0] for each in told(domain)] == ["newer_version", "undecodable"]
    assert done(domain) == 1


def test_only_its_own_consumer_takes_a_letter_and_only_one_process_at_a_time(
    domain: Database, handling: Handling, fragile: Fragile
) -> None:
    attempt(handling, from_kafka(envelope()))
    number = give_back(domain)
    with domain.connect() as one, domain.connect() as two:
        assert take(two, "other") is None
        taken = take(one, "reports")
        assert taken is not None and taken.dead_letter == number
        assert take(two, "reports") is None, "it is locked"
        one.commit()
        assert take(two, "reports") is None, "it is leased"


def test_a_letter_whose_process_dies_is_due_again_after_its_lease_and_not_for_ever(
    domain: Database, handling: Handling
) -> None:
    attempt(handling, from_kafka(envelope()))
    give_back(domain)
    for number in range(TAKES_MAX):
        with domain.connect() as conn:
            assert take(conn, "reports") is not None, number
            conn.execute("UPDATE fencepost.dead_letter SET due_at = due_at - interval '2 minutes'")
    with domain.connect() as conn:
        assert take(conn, "reports") is None
    assert told(domain) == [("handler_failed", 1, False)]
    give_back(domain)
    with domain.connect() as conn:
        assert take(conn, "reports") is not None, "until an operator says so again"


def test_two_copies_of_one_letter_run_one_handler(domain: Database, handling: Handling, fragile: Fragile) -> None:
    attempt(handling, from_kafka(envelope()))
    give_back(domain)
    fragile.mended = True
    with domain.connect() as conn:
        taken = take(conn, "reports")
    assert taken is not None
    with ThreadPoolExecutor(2) as threads:
        results = [
            each.exception() or each.result().outcome
            for each in [threads.submit(of(fragile).handle, domain.dsn, taken) for _ in range(2)]
        ]
    assert results.count(Outcome.HANDLED) == 1
    (other,) = (each for each in results if each is not Outcome.HANDLED)
    assert isinstance(other, InvalidInput) and other.field == "id"
    assert (letters(domain), done(domain)) == ([], 1)


def test_an_operator_and_a_handler_never_both_have_a_letter(domain: Database, fragile: Fragile) -> None:
    begun, go = threading.Event(), threading.Event()

    @inbox(consumer="reports")
    def slow(tx: Tx, event: Submitted) -> None:
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
        begun.set()
        assert go.wait(DEADLINE_SECONDS)

    failed = Handling(of(fragile), domain.dsn, ONCE)
    attempt(failed, from_kafka(envelope()))
    attempt(failed, from_kafka(envelope(operation="op-2"), 1))
    failed.close()
    first, second = (int(each["id"]) for each in letters(domain))
    give_back(domain, first)
    give_back(domain, second)
    with domain.connect() as conn:
        taken, given_up = take(conn, "reports"), take(conn, "reports")
    assert taken is not None and given_up is not None
    with domain.connect() as conn:
        acts.discard(conn, second, actor="ann", reason="not wanted")
    with pytest.raises(InvalidInput):
        slow.handle(domain.dsn, given_up)  # The operator was faster: nothing is handled.

    def discard() -> None:
        with domain.connect() as conn:
            acts.discard(conn, first, actor="ann", reason="too late")

    with ThreadPoolExecutor(2) as threads:
        handling = threads.submit(slow.handle, domain.dsn, taken)
        assert begun.wait(DEADLINE_SECONDS)
        discarding = threads.submit(discard)
        with domain.connect(autocommit=True) as conn:
            wait_for(
                lambda: conn.execute(WAITING, {"query": "%discard%"}).fetchall()[0][0] == 1,
                DEADLINE_SECONDS,
                "it to wait",
            )
            go.set()  # At once: the discard waits for its own few seconds only.
        assert handling.result(DEADLINE_SECONDS).outcome is Outcome.HANDLED
        with pytest.raises(InvalidInput, match="no such dead letter"):
            discarding.result(DEADLINE_SECONDS)
    assert (letters(domain), done(domain)) == ([], 1)


def test_a_database_error_that_is_not_the_handlers_fault_leaves_the_letter_due(
    domain: Database, fragile: Fragile
) -> None:
    attempt(failed := Handling(of(fragile), domain.dsn, ONCE), from_kafka(envelope()))
    failed.close()
    give_back(domain)

    @inbox(consumer="reports")
    def losing(tx: Tx, event: Submitted) -> None:
        tx.execute("DO $$ BEGIN RAISE serialization_failure; END $$")

    unlucky = Handling(losing, domain.dsn, ONCE)
    assert unlucky.retry()
    unlucky.close()
    assert told(domain) == [("handler_failed", 1, True)]


def test_async_handlers_retry_too(domain: Database) -> None:
    mended = False

    @inbox(consumer="reports")
    async def handler(tx: AsyncConnection[Any], event: Submitted) -> None:
        await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
        if not mended:
            raise ValueError

    async def run() -> list[bool]:
        nonlocal mended
        made = AsyncHandling(handler, domain.dsn, ONCE)
        assert not isinstance(await made.attempt(from_kafka(envelope()), Tries(ONCE)), Again)
        await asyncio.to_thread(give_back, domain)
        results = [await made.retry()]
        assert [each[0::2] for each in told(domain)] == [("handler_failed", False)]
        mended = True
        await asyncio.to_thread(give_back, domain)
        results += [await made.retry(), await made.retry()]
        await made.close()
        return results

    assert asyncio.run(run()) == [True, True, False]
    assert (letters(domain), done(domain)) == ([], 1)


def test_acts_are_refused_without_a_letter_an_actor_or_a_reason_and_on_a_disarmed_database(domain18: Database) -> None:
    made = Handling(of(Fragile()), domain18.dsn, ONCE)
    attempt(made, from_kafka(envelope()))
    made.close()
    number = int(letters(domain18)[0]["id"])
    for act in (acts.retry, acts.discard, acts.read):
        for at, actor, reason, field in (
            (number + 1, "ann", "why", "id"),
            (number, "", "why", "actor"),
            (number, "ann", " padded", "reason"),
        ):
            with domain18.connect() as conn, pytest.raises(InvalidInput) as refused:
                act(conn, at, actor=actor, reason=reason)
            assert refused.value.field == field
        with domain18.connect() as conn, conn.transaction(force_rollback=True):
            act(conn, number, actor="ann", reason="the control")
    for act in (acts.retry, acts.discard):
        with domain18.connect() as conn:
            conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
            with pytest.raises(NotArmed):
                act(conn, number, actor="ann", reason="why")
    with domain18.connect() as conn, pytest.raises(InvalidInput) as refused:
        acts.retry(conn, number, actor="ann", reason="why", unhandled=True)
    assert refused.value.field == "unhandled"


def test_what_is_due_in_a_copy_of_the_database_is_not_taken_before_it_is_armed(domain18: Database) -> None:
    made = Handling(of(Fragile()), domain18.dsn, ONCE)
    attempt(made, from_kafka(envelope()))
    made.close()
    give_back(domain18)
    with domain18.connect() as conn:
        with conn.transaction(force_rollback=True):
            conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
            assert take(conn, "reports") is None
        assert take(conn, "reports") is not None  # the control


def test_a_letter_of_a_caller_with_its_own_transaction_cannot_be_given_to_a_runner(domain18: Database) -> None:
    reports = of(Fragile())
    with domain18.connect() as conn:
        reports.reserve_in(conn, envelope(), '["mine", 1]')
        reports.reserve_in(conn, envelope(document="b"), '["mine", 2]')
    with domain18.connect() as conn, pytest.raises(InvalidInput) as refused:
        acts.retry(conn, int(letters(domain18)[0]["id"]), actor="ann", reason="why")
    assert refused.value.field == "coordinates"


def test_letters_are_handled_one_after_the_other_within_a_pool_of_one(domain18: Database) -> None:
    fragile = Fragile()
    made = Handling(of(fragile), domain18.dsn, RunnerOptions(max_attempts=1, concurrency=1))
    for number in range(5):
        attempt(made, from_kafka(envelope(operation=f"op-{number}"), number))
    with domain18.connect() as conn:
        conn.execute("UPDATE fencepost.dead_letter SET due_at = now() - interval '1 second'")
    fragile.mended = True
    while made.retry():
        pass
    made.close()
    assert (letters(domain18), done(domain18)) == ([], 5)
