"""Tests of a user, all of which fail; what they print is what is looked at."""

from fencepost.operate.testing import Database, MemoryBroker, assert_enqueued, assert_submitted, crash
from fencepost.relay import outbox
from support.kit.app import Accepted, Withdrawn, accept, on_accepted


def test_other_events(fencepost_database: Database) -> None:
    with fencepost_database.connect() as conn:
        outbox.enqueue(conn, Accepted(tenant="acme", operation="op-1", n=4711, note="hidden-note"))
        outbox.enqueue(conn, Withdrawn(tenant="acme", operation="op-2", reason="hidden-reason"))
        assert_enqueued(conn, Accepted, tenant="acme", n=1)


def test_too_often(fencepost_database: Database) -> None:
    accept(fencepost_database.dsn, 21, 22)
    with fencepost_database.connect() as conn:
        assert_enqueued(conn, Accepted)


def test_nothing_at_all(fencepost_database: Database) -> None:
    with fencepost_database.connect() as conn:
        assert_enqueued(conn, Accepted)


def test_other_jobs(fencepost_database: Database, fencepost_broker: MemoryBroker) -> None:
    accept(fencepost_database.dsn, 4712)
    fencepost_broker.relay()
    fencepost_broker.deliver(on_accepted)
    with fencepost_database.connect() as conn:
        assert_submitted(conn, "kit.report", operation="op-31")


def test_no_crash(fencepost_database: Database, fencepost_broker: MemoryBroker) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    with crash("after cmmit"):
        fencepost_broker.deliver(on_accepted)
