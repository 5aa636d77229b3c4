"""Where an event is sent again after a later one of its key was confirmed, that is on record; the ledger is the broker's."""

from typing import LiteralString

from support.database import Database
from support.memory_broker import Lossy, MemoryBroker
from support.relays import accepted, arrived, destination, relay_once, relaying, value

RECORDED: LiteralString = """
SELECT g.destination, g.tenant, g.ordering_key, g.operation, g.type, o.operation
FROM fencepost.overtaken AS g JOIN fencepost.outbox AS o ON o.seq = g.overtaken_by ORDER BY g.seq"""


def test_an_overtaken_event_is_published_and_on_record_in_the_commit_of_its_ack(database: Database) -> None:
    broker = MemoryBroker()
    accepted(database, "a-1", "a-2", key="a")
    assert relay_once(database, destination(broker)).overtaken == 0  # the control: nothing on record
    with database.connect() as conn:
        assert conn.execute(RECORDED).fetchall() == []
    # With several events of a key in flight, as Kafka has them, a later one may get through.
    broker = MemoryBroker(Lossy("b-1"), withholding=False)
    accepted(database, "b-1", "b-2", "b-3", key="b")
    accepted(database, "c-1", "c-2", key="c")

    counted = relay_once(database, destination(broker))

    assert [o for o in broker.operations() if o.startswith("b")] == ["b-2", "b-3", "b-1"]
    assert (counted.published, counted.overtaken) == (5, 1)
    with database.connect() as conn:
        assert conn.execute(RECORDED).fetchall() == [("memory", "acme", "b", "b-1", "relay.changed", "b-3")]


def test_it_is_on_record_before_the_overtaken_event_has_its_answer(database: Database) -> None:
    lossy = Lossy("b-1")
    lossy.once = False
    broker = MemoryBroker(lossy, withholding=False)
    accepted(database, "b-1", "b-2", key="b")
    with relaying(database, destination(broker)) as loop:
        arrived(broker.operations, 1)
    assert loop.counters.published == 1
    with database.connect(autocommit=True) as conn:
        assert conn.execute(RECORDED).fetchall() == [("memory", "acme", "b", "b-1", "relay.changed", "b-2")]
        lossy.lost.clear()
        relay_once(database, destination(broker))
        assert broker.operations() == ["b-2", "b-1", "b-2"]
        assert value(conn, "SELECT count(*) FROM fencepost.overtaken") == 1
