"""What the inbox costs a consumer: the same loop over the same messages, without it, with it, and in batches.

Without: the event is read and verified, and the handler runs in a transaction of its own. Floor: the same with one more
statement that inserts two bare rows, as an inbox by hand would. Single, batch: `handle`, and `handle_many`. Rounds are interleaved; ratios compare what ran side by side, absolute numbers belong to this machine.
`--gate` ends with 1 when a bound is missed. Loads are bounded in count and in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString, cast

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

import aio_pika
import psycopg
from aio_pika.abc import AbstractIncomingMessage
from bench.relay import stage
from confluent_kafka import Consumer, Message, Producer
from psycopg import AsyncConnection, Connection

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Handled, Outcome
from fencepost.consumer.reading import Arrived
from fencepost.consumer.transactions import async_transactions_of, transactions_of
from fencepost.schemas import amqp_binding, kafka_binding
from stack.obtain import obtain_kafka, obtain_postgres, obtain_rabbitmq
from stack.process import Unavailable
from support.database import Database, Databases
from support.deliveries import Submitted, envelope
from support.wire import listening

WAYS = ("without", "floor", "single", "batch")
BATCH = 100
# Before the time counts: a consumer's connection lives for hours, its first messages compile and prepare what the rest uses.
WARM, WARM_BATCH = 50, 5
TABLE: LiteralString = """
CREATE TABLE report (tenant text, operation text, document text, changed_at timestamptz NOT NULL DEFAULT now(),
                     PRIMARY KEY (tenant, operation))"""
FLOOR: LiteralString = """
CREATE TABLE arrived (consumer text, coordinates text, operation text, meaning bytea, at timestamptz NOT NULL DEFAULT now(),
                      PRIMARY KEY (consumer, coordinates));
CREATE TABLE taken (tenant text, consumer text, operation text, type text, at timestamptz NOT NULL DEFAULT now(),
                    PRIMARY KEY (tenant, consumer, operation, type))"""
TAKE: LiteralString = """
WITH a AS (INSERT INTO arrived (consumer, coordinates, operation, meaning)
           VALUES ('bench', %(coordinates)s, %(operation)s, %(meaning)s) ON CONFLICT DO NOTHING)
INSERT INTO taken (tenant, consumer, operation, type) VALUES (%(tenant)s, 'bench', %(operation)s, %(type)s)
ON CONFLICT DO NOTHING RETURNING 1"""
CHANGE: LiteralString = """
INSERT INTO report (tenant, operation, document) VALUES (%(tenant)s, %(operation)s, %(document)s)
ON CONFLICT (tenant, operation) DO UPDATE SET document = excluded.document, changed_at = now()"""
DONE: LiteralString = "SELECT count(*) FROM report WHERE operation LIKE %(prefix)s || '-%%'"


def values(event: Submitted) -> dict[str, str]:
    """What the handler writes."""
    return {"tenant": event.tenant, "operation": event.operation, "document": event.document}


def taking(arrived: Arrived, delivery: Delivery) -> dict[str, object]:
    """What a floor writes."""
    envelope = arrived.envelope
    return {
        "tenant": envelope.tenant,
        "operation": envelope.operation,
        "type": envelope.type,
        "coordinates": delivery.coordinates,
        "meaning": envelope.digest.raw,
    }


@inbox(consumer="bench")
def on_submitted(tx: Connection[Any], event: Submitted) -> None:
    """One realistic change."""
    tx.execute(CHANGE, values(event))


@inbox(consumer="bench")
async def on_submitted_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    """One realistic change."""
    await tx.execute(CHANGE, values(event))


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement."""

    rate: float
    cpu: float
    statements: float = 0.0
    round_trips: float = 0.0


@dataclass(slots=True)
class Bench:
    """What is measured, and the bounds that were missed."""

    options: argparse.Namespace
    database: Database
    missed: list[str] = field(default_factory=list[str])

    def say(self, text: str) -> None:
        """One measured line."""
        print(text, flush=True)

    def bound(self, what: str, value: float, limit: float, *, least: bool) -> None:
        """One measured value beside its bound."""
        fine = value >= limit if least else value <= limit
        self.say(f"    {'holds ' if fine else 'MISSED'}  {what}: {value:.2f} ({'>=' if least else '<='} {limit:.2f})")
        if not fine:
            self.missed.append(what)

    def compare(self, name: str, measure: Callable[[str, int, bool], Run]) -> None:
        """All ways in turn, `--rounds` times; each goes first in turn. Statements are counted apart: that takes time."""
        runs: dict[str, list[Run]] = {way: [] for way in WAYS}
        counted = {way: measure(way, BATCH, True) for way in WAYS}
        for turn in range(self.options.rounds):
            for step in range(len(WAYS)):
                way = WAYS[(turn + step) % len(WAYS)]
                runs[way].append(measure(way, self.options.events, False))
        self.say(f"{name}, {self.options.events:,} events, {self.options.rounds} rounds, batches of {BATCH}:")
        for way, found in runs.items():
            rates = [run.rate for run in found]
            self.say(
                f"  {way:8s} {statistics.median(rates):8,.0f}/s [{min(rates):,.0f}-{max(rates):,.0f}]"
                f" {statistics.median(run.cpu for run in found):7.0f} us CPU each,"
                f" {counted[way].statements:.2f} statements, {counted[way].round_trips:.2f} round trips each"
            )
        self.say(f"    the floor to without: {ratio(runs['floor'], runs['without']):.2f}")
        self.bound(f"{name}, single to without", ratio(runs["single"], runs["without"]), 0.75, least=True)
        self.bound(f"{name}, batch to single", ratio(runs["batch"], runs["single"]), 3.0, least=True)
        # Reservation, delivery, and the bound of the wait are one statement.
        own = counted["single"].statements - counted["without"].statements
        self.bound(f"{name}, statements of the inbox for each message, single", own, 1.0, least=False)
        own = counted["batch"].statements - counted["without"].statements
        self.bound(f"{name}, statements of the inbox for each message, batch", own, 0.1, least=False)

    def require(self, prefix: str, count: int) -> None:
        """Each operation is there: what was not done is not measured."""
        with self.database.connect() as conn:
            row = conn.execute(DONE, {"prefix": prefix}).fetchone()
        if row != (count,):
            raise SystemExit(f"only {row} of {count} operations are in the domain table")


def ratio(over: Sequence[Run], under: Sequence[Run]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a.rate / b.rate for a, b in zip(over, under, strict=True))


@contextlib.contextmanager
def timed(conn: Connection[Any] | AsyncConnection[Any], count: int, listen: bool, found: list[Run]) -> Generator[None]:
    """Time and CPU of this process in the block; or what was sent, which costs time."""
    with listening(conn) if listen else contextlib.nullcontext() as sent:
        began, cpu = time.monotonic(), time.process_time()
        yield
        spent, cpu = time.monotonic() - began, time.process_time() - cpu
    found.append(Run(count / spent, cpu / count * 1e6))
    if sent is not None:
        found[-1] = Run(0.0, 0.0, len(sent.statements) / count, sent.round_trips / count)


def settled(results: Sequence[object]) -> None:
    """Only what was handled counts."""
    assert all(isinstance(each, Handled) and each.outcome is Outcome.HANDLED for each in results)


def events(prefix: str, count: int) -> Generator[Any]:
    """Envelopes of different operations, as old as what a consumer reads that keeps up."""
    now = datetime.now(UTC)
    return (envelope(operation=f"{prefix}-{n}", document="d" * 100, time=now) for n in range(count))


def kafka(bench: Bench, bootstrap: str) -> None:
    """One partition in its order, from a plain confluent-kafka loop."""

    def measure(way: str, count: int, listen: bool) -> Run:
        prefix, topic = uuid.uuid4().hex[:8], stage.topic(bootstrap)
        producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
        for each in events(prefix, WARM + count):
            key = kafka_binding.key(each.tenant, each.ordering_key)
            producer.produce(topic, each.payload, key, headers=list(kafka_binding.encode(each)))
        assert producer.flush(30) == 0
        config: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": prefix,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        consumer = Consumer(config)
        consumer.subscribe([topic])
        found: list[Run] = []
        with psycopg.connect(bench.database.dsn, connect_timeout=10) as conn:
            conn.autocommit = True
            transactions = transactions_of(conn, on_submitted.handler)
            until = time.monotonic() + bench.options.seconds

            def handle(arrived: list[Message]) -> int:
                deliveries = [
                    Delivery.from_kafka(
                        cluster_id="bench",
                        topic=topic,
                        partition=0,
                        offset=message.offset() or 0,
                        headers=cast(Any, message.headers()),
                        key=cast(bytes, message.key()),
                        value=cast(bytes, message.value()),
                    )
                    for message in arrived
                ]
                match way:
                    case "without" | "floor":
                        for each in deliveries:
                            read = on_submitted.reading.read(each)
                            with conn.transaction():
                                if way == "floor":
                                    assert conn.execute(TAKE, taking(read, each)).fetchone() is not None
                                on_submitted.handler(conn, cast(Submitted, read.argument))
                    case "single":
                        settled([on_submitted.handle(transactions, each) for each in deliveries])
                    case _:
                        settled(on_submitted.handle_many(transactions, deliveries))
                if arrived:
                    consumer.commit(message=arrived[-1], asynchronous=True)
                if time.monotonic() > until:
                    raise SystemExit("a measurement did not end in time")
                return len(arrived)

            done = handle(consumer.consume(1, 30))
            while done < WARM:
                done += handle(consumer.consume(min(WARM_BATCH, WARM - done), 0.05))
            with timed(conn, count, listen, found):
                while done < WARM + count:
                    done += handle(consumer.consume(min(BATCH, WARM + count - done), 0.05))
        consumer.close()
        bench.require(prefix, WARM + count)
        return found[0]

    bench.compare("kafka", measure)


@contextlib.asynccontextmanager
async def arriving(url: str, queue: str) -> AsyncGenerator[asyncio.Queue[AbstractIncomingMessage]]:
    """Messages as the broker pushes them, unacknowledged."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        await channel.set_qos(prefetch_count=4 * BATCH)
        source = await channel.get_queue(queue)
        found: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        tag = await source.consume(cast(Callable[[AbstractIncomingMessage], Awaitable[Any]], found.put))
        yield found
        await source.cancel(tag)
        await source.delete(if_unused=False, if_empty=False)


async def filled(url: str, queue: str, prefix: str, count: int) -> None:
    """A quorum queue with a backlog."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
        waiting: list[Awaitable[Any]] = []
        for each in events(prefix, count):
            headers, content_type = amqp_binding.encode(each)
            message = aio_pika.Message(
                each.payload, headers=dict(headers), content_type=content_type, message_id=str(each.id), delivery_mode=2
            )
            waiting.append(channel.default_exchange.publish(message, queue))
            if len(waiting) >= 200:
                await asyncio.gather(*waiting)
                waiting.clear()
        await asyncio.gather(*waiting)


def rabbitmq(bench: Bench, url: str) -> None:
    """One quorum queue in its order, from a plain aio-pika loop."""

    async def consumed(way: str, count: int, listen: bool) -> Run:
        prefix = uuid.uuid4().hex[:8]
        queue = f"bench-{prefix}"
        await filled(url, queue, prefix, WARM + count)
        found: list[Run] = []
        async with (
            await AsyncConnection.connect(bench.database.dsn, connect_timeout=10, autocommit=True) as conn,
            arriving(url, queue) as messages,
            asyncio.timeout(bench.options.seconds),
        ):
            transactions = async_transactions_of(conn, on_submitted_async.handler)

            async def handle(most: int) -> int:
                arrived = [await messages.get()]
                while len(arrived) < most and not messages.empty():
                    arrived.append(messages.get_nowait())
                deliveries = [
                    Delivery.from_rabbitmq(
                        cluster="bench",
                        vhost="/",
                        queue=queue,
                        message_id=message.message_id,
                        headers=message.headers,
                        content_type=message.content_type,
                        body=message.body,
                    )
                    for message in arrived
                ]
                match way:
                    case "without" | "floor":
                        for each, message in zip(deliveries, arrived, strict=True):
                            read = on_submitted_async.reading.read(each)
                            async with conn.transaction():
                                if way == "floor":
                                    cursor = await conn.execute(TAKE, taking(read, each))
                                    assert await cursor.fetchone() is not None
                                await on_submitted_async.handler(conn, cast(Submitted, read.argument))
                            await message.ack()
                    case "single":
                        for each, message in zip(deliveries, arrived, strict=True):
                            settled([await on_submitted_async.handle(transactions, each)])
                            await message.ack()
                    case _:
                        settled(await on_submitted_async.handle_many(transactions, deliveries))
                        await arrived[-1].ack(multiple=True)
                return len(arrived)

            done = 0
            while done < WARM:
                done += await handle(min(WARM_BATCH, WARM - done))
            with timed(conn, count, listen, found):
                while done < WARM + count:
                    done += await handle(min(BATCH, WARM + count - done))
        bench.require(prefix, WARM + count)
        return found[0]

    bench.compare("rabbitmq", lambda way, count, listen: asyncio.run(consumed(way, count, listen)))


def main(options: argparse.Namespace, opened: contextlib.ExitStack) -> bool:
    """Runs what was asked for; True when no bound was missed."""
    server = obtain_postgres(options.major)
    opened.callback(server.close)
    databases = Databases(server.address, Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))))
    opened.callback(databases.close)
    database = databases.migrated()
    opened.callback(databases.drop, database)
    with database.connect() as conn:
        conn.execute(TABLE)
        conn.execute(FLOOR)
    bench = Bench(options, database)
    bench.say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before; {server.label}")
    for name, obtain, run in (("kafka", obtain_kafka, kafka), ("rabbitmq", obtain_rabbitmq, rabbitmq)):
        if options.only and name not in options.only:
            continue
        try:
            found = obtain()
        except Unavailable as error:
            bench.say(f"NOT MEASURED, no {name}: {error}")
            bench.missed.append(f"{name} is missing")
            continue
        opened.callback(found.close)
        run(bench, found.address)
    bench.say(f"load {os.getloadavg()[0]:.1f} after")
    bench.say("every bound holds" if not bench.missed else f"{len(bench.missed)} MISSED: {'; '.join(bench.missed)}")
    return not bench.missed


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("kafka", "rabbitmq"), help="these brokers instead of all")
    parser.add_argument("--events", type=int, default=2000, help="messages of one measurement")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time of one measurement")
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    with contextlib.ExitStack() as stacked:
        held = main(given, stacked)
    sys.exit(0 if held or not given.gate else 1)
