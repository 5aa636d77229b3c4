"""A rolling upgrade: the next version's schema under this version's processes, both side by side, and back to this one.

The next version is a copy of the sources with more in it (`support.next_version`), applied by its own `migrate` while this
version's relay, consumer and worker are at work. The oracles are two domain tables without a unique key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, LiteralString

import pytest
from psycopg import Connection

from fencepost.jobs.progress import progress
from fencepost.relay import outbox
from fencepost.schemas import contract, migrate
from fencepost.schemas.errors import ContractMismatch
from fencepost.schemas.event import Event
from support import next_version
from support.brokers import declare, delete
from support.command_line import CLI, environment
from support.database import Database
from support.processes import Child, wait_for
from support.services import Rabbit

TABLES: LiteralString = """
CREATE TABLE applied (operation text NOT NULL, by text NOT NULL, note text);
CREATE TABLE made (operation text NOT NULL, by text NOT NULL)"""
# One process: a relay, a consumer and a worker of its version; or its producer, whose events have a member more.
APP = """
import os, signal, sys, threading, traceback
from pathlib import Path

import psycopg

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.jobs.worker import Worker
from fencepost.relay import outbox
from fencepost.relay.destination import Destination
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.relay.sidecar import Relay
from fencepost.schemas.event import Event

role, by, dsn, state, url, queue = sys.argv[1:7]

if by == "next":
    class Placed(Event, type="order.placed", version=1):
        n: int
        note: str | None = None
else:
    class Placed(Event, type="order.placed", version=1):
        n: int

if role == "produce":
    with psycopg.connect(dsn) as conn:
        for n in range(int(sys.argv[7]), int(sys.argv[8])):
            outbox.enqueue(conn, Placed(tenant="acme", operation=f"{by}-{n}", n=n, note="from the next version"))
            conn.commit()
    sys.exit()

@inbox(consumer="orders")
def on_placed(tx, event: Placed):
    note = getattr(event, "note", None)
    tx.execute("INSERT INTO applied (operation, by, note) VALUES (%s, %s, %s)", (event.operation, by, note))
    handoff.submit(tx, "order.make", {"n": event.n}, tenant=event.tenant, operation=event.operation)

worker = Worker()

@worker.job("order.make", lease=5.0, max_effect_timeout=5.0, network_bound=0.0)
def make(ctx, job):
    ctx.publish(lambda tx: tx.execute("INSERT INTO made (operation, by) VALUES (%s, %s)", (job.operation, by)))

stop = threading.Event()
route = [Route("*", "", queue)]
pace = Pace(lease=8.0, refresh=0.3, confirm=2.5, poll_max=0.05, drain=3.0)
relay = Relay(dsn, [Destination("orders", "rabbitmq", route, lambda source: RabbitPublisher(url, source=source))], pace=pace)
runner = RabbitRunner(on_placed, dsn, url=url, queue=queue, options=RunnerOptions(concurrency=2, backoff_base=0.05))

def ended(signum, frame):
    relay.stop()
    stop.set()

signal.signal(signal.SIGTERM, ended)

def guarded(part):
    try:
        part()
    except BaseException:
        traceback.print_exc()
        os._exit(7)

parts = [relay.run, lambda: runner.run(stop), lambda: worker.run(dsn, stop=stop, state=Path(state), concurrency=2)]
threads = [threading.Thread(target=guarded, args=(part,)) for part in parts]
for thread in threads:
    thread.start()
print("running", flush=True)
for thread in threads:
    thread.join()
"""


class Placed(Event, type="order.placed", version=1):
    """An order, as this version knows it."""

    n: int


class Shop:
    """The domain of the test: orders that are placed, applied by a consumer, and made by a worker."""

    def __init__(self, database: Database, conn: Connection[Any]) -> None:
        self._database = database
        self._conn = conn
        self.placed: list[str] = []

    def place(self, count: int) -> None:
        """Places orders, each in a transaction of its own."""
        with self._database.connect() as conn:
            for _ in range(count):
                n = len(self.placed)
                outbox.enqueue(conn, Placed(tenant="acme", operation=f"this-{n}", n=n))
                conn.commit()
                self.placed.append(f"this-{n}")

    def count(self, statement: LiteralString) -> int:
        row = self._conn.execute(statement).fetchone()
        assert row is not None
        return int(row[0])

    def until(self, done: Callable[[], bool], what: str, *watched: Child) -> None:
        """Places an order now and then until it is done; whoever ends meanwhile has failed."""

        def look() -> bool:
            for child in watched:
                assert child.alive, child.text[-3000:]
            self.place(1)
            return done()

        wait_for(look, 60, what)

    def all_made(self) -> bool:
        """Whether every order has been through everything."""
        return self.count("SELECT count(DISTINCT operation) FROM made") >= len(self.placed)


def test_a_schema_is_migrated_under_running_code_both_versions_work_on_it_and_the_old_one_goes_on(
    database18: Database, rabbitmq: Rabbit, tmp_path: Path
) -> None:
    upgraded = next_version.make(tmp_path / "next")
    queue = rabbitmq.name()
    declare(rabbitmq, queue)
    paths = {"this": next_version.path_of(next_version.ROOT), "next": next_version.path_of(upgraded)}

    def app(by: str, *more: str, role: str = "serve") -> Child:
        arguments = [role, by, database18.dsn, str(database18.state), rabbitmq.url, queue, *more]
        return Child.script(APP, folder=tmp_path / f"{by}-{role}", arguments=arguments, PYTHONPATH=paths[by])

    def command(by: str, *words: str) -> Child:
        folder = tmp_path / f"command-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        env = environment(database18, {"PYTHONPATH": paths[by]})
        return Child([*CLI, *words], output=folder / "output", env=env)

    with database18.connect(autocommit=True) as conn:
        conn.execute(TABLES)
        shop = Shop(database18, conn)
        with app("this") as old:
            old.says("running")
            shop.until(lambda: shop.count("SELECT count(*) FROM made") >= 5, "this version to work", old)

            # The next version's code is not for this database yet, and says so.
            with command("next", "status") as early:
                assert early.wait() == 1 and "[database]; run `fencepost migrate`" in early.text, early.text

            # Who deadlocks with a migration, or waits too long for it, has changed nothing: it is run again.
            def migrated() -> bool:
                with command("next", "migrate") as migrating:
                    shop.until(lambda: not migrating.alive, "the migration to end", old)
                    code = migrating.wait()
                    assert code == 0 or "[40P01]" in migrating.text or "[55P03]" in migrating.text, migrating.text
                return code == 0

            wait_for(migrated, 60, "the migration")
            assert contract.read(conn) == (contract.CONTRACT + 1, contract.CONTRACT)
            made = shop.count("SELECT count(*) FROM made")
            shop.until(lambda: shop.count("SELECT count(*) FROM made") >= made + 10, "this version, migrated", old)
            # A parameter more, with a default: the old call means what it meant.
            assert progress(conn, tenant="acme", operation="this-0", job_class="order.make") is None

            with app("next") as new, app("next", "0", "20", role="produce") as producer:
                new.says("running")
                assert producer.wait() == 0, producer.text
                shop.until(lambda: shop.count(BOTH) == 4, "both versions at work side by side", old, new)
                shop.until(lambda: shop.count(NEWLY) > 0, "a job that the next version has claimed", old, new)
                assert new.terminate(40) == 0, new.text

            # Back: this version alone, one process of it started afresh, and the last events of the next one.
            with app("next", "20", "30", role="produce") as producer:
                assert producer.wait() == 0, producer.text
            shop.placed += [f"next-{n}" for n in range(30)]
            assert old.terminate(40) == 0, old.text
        with pytest.raises(ContractMismatch, match="newer version has migrated"):
            migrate.apply(database18.dsn, state=database18.state)
        with app("this") as old:
            old.says("running")
            shop.place(5)
            wait_for(shop.all_made, 60, "every order of both versions to be made")
            assert old.terminate(40) == 0, old.text

        for table in ("applied", "made"):
            rows = conn.execute(f"SELECT operation FROM {table} ORDER BY 1".encode()).fetchall()
            assert [str(operation) for (operation,) in rows] == sorted(shop.placed), table
        assert shop.count("SELECT count(*) FROM applied WHERE by = 'this' AND operation LIKE 'next-%'") >= 10
        assert shop.count(SET_ASIDE) == 0
        assert shop.count("SELECT count(*) FROM fencepost.job WHERE exec <> 'done'") == 0
    delete(rabbitmq, queue)


BOTH: LiteralString = """
SELECT (SELECT count(DISTINCT by) FROM applied) + (SELECT count(DISTINCT by) FROM made)"""
NEWLY: LiteralString = "SELECT count(*) FROM fencepost.job WHERE claimed_with = 'next'"
SET_ASIDE: LiteralString = """
SELECT (SELECT count(*) FROM fencepost.dead_letter) + (SELECT count(*) FROM fencepost.parked)"""
