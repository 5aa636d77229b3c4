"""Two consumers under kills, rebalances and redeliveries; at the end each operation was applied exactly once.

The consumers are runner processes of their own. One of them is killed with SIGKILL, stopped, or joined by a third at
random; part of the events arrive twice. The oracle is the domain table, which has no unique key. The seed is printed:
`--seed` repeats what is decided here, not how processes race.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

import aio_pika
from aio_pika.abc import AbstractChannel
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from stack.obtain import obtain_kafka, obtain_postgres, obtain_rabbitmq
from support.database import Database, Databases
from support.deliveries import Submitted, envelope
from support.processes import Child

ROOTS = ("schemas", "relay", "consumer", "jobs", "operate", "compose", "tests")
PARTITIONS = 4
TWICE = 0.1
QUIET_SECONDS = 3.0
TABLE: LiteralString = "CREATE TABLE applied (operation text NOT NULL, n bigint GENERATED ALWAYS AS IDENTITY)"
COUNTED: LiteralString = "SELECT count(*), count(DISTINCT operation) FROM applied"
KEPT: LiteralString = (
    "SELECT (SELECT count(*) FROM fencepost.reservation), (SELECT count(*) FROM fencepost.dead_letter)"
)

CHILD = """
import json, sys
from fencepost.consumer.inbox import inbox
from fencepost.consumer.runner import RunnerOptions
from support.deliveries import Submitted

kind, dsn, address, place = json.loads(sys.argv[1])

@inbox(consumer="soak")
def on_submitted(tx, event: Submitted) -> None:
    tx.execute("INSERT INTO applied (operation) VALUES (%s)", (event.operation,))

options = RunnerOptions(backoff_base=0.05, backoff_max=0.5, drain_seconds=10)
if kind == "kafka":
    from fencepost.consumer.kafka import KafkaRunner
    config = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300}
    runner = KafkaRunner(on_submitted, dsn, bootstrap=address, topics=[place], config=config, options=options)
else:
    from fencepost.consumer.rabbitmq import RabbitRunner
    runner = RabbitRunner(on_submitted, dsn, url=address, queue=place, options=options)
print("running", flush=True)
runner.run()
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What was left at the end, and what was done to the consumers on the way."""

    applied: int
    operations: int
    reservations: int
    dead_letters: int
    kills: int
    stops: int
    joins: int


def arriving(count: int, seed: random.Random) -> Iterator[Envelope]:
    """Each operation once, and some of them again a little later; 50 ordering keys."""
    again: list[Envelope] = []
    for n in range(count):
        event = Submitted(tenant="acme", operation=f"op-{n}", document="d", ordering_key=f"k{n % 50}")
        sent = envelope(event)
        yield sent
        if seed.random() < TWICE:
            again.append(sent)
        if len(again) > 20:
            yield again.pop(seed.randrange(len(again)))
    yield from again


def to_kafka(bootstrap: str, events: Iterator[Envelope]) -> str:
    """A topic of four partitions with all events."""
    topic = f"soak-{uuid.uuid4().hex[:12]}"
    admin: Any = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)], operation_timeout=15)[topic].result(timeout=20)
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    for each in events:
        key = kafka_binding.key(each.tenant, each.ordering_key)
        producer.produce(topic, each.payload, key, headers=list(kafka_binding.encode(each)))
    assert producer.flush(60) == 0
    return topic


async def declare(channel: AbstractChannel, queue: str) -> None:
    """A queue without a delivery limit that kills could reach."""
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000}
    await channel.declare_queue(queue, durable=True, arguments=arguments)


def to_rabbitmq(url: str, events: Iterator[Envelope]) -> str:
    """A quorum queue with all events."""
    queue = f"soak-{uuid.uuid4().hex[:12]}"

    async def fill() -> None:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            await declare(channel, queue)
            waiting: list[Any] = []
            for each in events:
                headers, content_type = amqp_binding.encode(each)
                message = aio_pika.Message(
                    each.payload,
                    headers=dict(headers),
                    content_type=content_type,
                    message_id=str(each.id),
                    delivery_mode=2,
                )
                waiting.append(channel.default_exchange.publish(message, queue, mandatory=True))
                if len(waiting) >= 200:
                    await asyncio.gather(*waiting)
                    waiting.clear()
            await asyncio.gather(*waiting)

    asyncio.run(fill())
    return queue


def remove_queue(url: str, queue: str) -> None:
    """The queue of a run."""

    async def remove() -> None:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            await channel.queue_delete(queue)

    asyncio.run(remove())


def counted(database: Database) -> tuple[int, int]:
    """Rows and operations of the domain table."""
    with database.connect(autocommit=True) as conn:
        row = conn.execute(COUNTED).fetchone()
    assert row is not None
    return row[0], row[1]


def soak(
    kind: str,
    database: Database,
    address: str,
    *,
    count: int,
    seed: int,
    seconds: float,
    folder: Path,
    pause: float = 4.0,
    say: Callable[[str], None] = print,
) -> Found:
    """One run: until every operation was applied and what came twice has been settled, at most `seconds`."""
    decide = random.Random(seed)
    events = arriving(count, decide)
    place = to_kafka(address, events) if kind == "kafka" else to_rabbitmq(address, events)
    with database.connect() as conn:
        conn.execute(TABLE)
    kills = stops = joins = 0
    path = ":".join(str(ROOT / root) for root in ROOTS)
    arguments = [json.dumps([kind, database.dsn, address, place])]
    made = [Child.script(CHILD, folder=folder, arguments=arguments, PYTHONPATH=path) for _ in range(3)]
    until = time.monotonic() + seconds
    try:
        for each in made[:2]:
            each.start()
        seen, at, acted = -1, time.monotonic(), 0
        while True:
            applied = counted(database)[1]
            if applied != seen:
                seen, at = applied, time.monotonic()
            if applied >= count and time.monotonic() - at > QUIET_SECONDS:
                break
            if time.monotonic() > until:
                raise SystemExit(f"{kind}: {applied} of {count} operations after {seconds:.0f} s (seed {seed})")
            time.sleep(pause * decide.uniform(0.5, 1.5) if applied < count else 0.2)
            if applied >= count:
                continue
            # Where children begin slowly, what is killed before anything was applied would never come to an end.
            while counted(database)[1] <= acted and time.monotonic() < until:
                time.sleep(0.05)
            chosen = made[decide.randrange(2)]
            match decide.choice(("kill", "kill", "stop", "join")):
                case "kill":
                    kills += 1
                    chosen.kill()
                    chosen.start()
                case "stop":
                    stops += 1
                    chosen.terminate(30)
                    chosen.start()
                case _ if made[2].alive:
                    made[2].terminate(30)
                case _:
                    joins += 1
                    made[2].start()
            acted = counted(database)[1]
            say(f"  {kind}: {applied:,} of {count:,}; {kills} kills, {stops} stops, {joins} joins")
    finally:
        for each in made:
            each.kill()
        if kind == "rabbitmq":
            remove_queue(address, place)
    with database.connect() as conn:
        row = conn.execute(KEPT).fetchone()
    assert row is not None
    return Found(*counted(database), row[0], row[1], kills, stops, joins)


def main(options: argparse.Namespace, opened: contextlib.ExitStack) -> bool:
    """Runs both brokers; True when each operation was applied exactly once on each."""
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    server = obtain_postgres(options.major)
    opened.callback(server.close)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="soak-consumer-")))
    databases = Databases(server.address, folder)
    opened.callback(databases.close)
    fine = True
    for kind, obtain in (("kafka", obtain_kafka), ("rabbitmq", obtain_rabbitmq)):
        if kind not in options.only:
            continue
        broker = obtain()
        opened.callback(broker.close)
        database = databases.migrated()
        opened.callback(databases.drop, database)
        found = soak(
            kind,
            database,
            broker.address,
            count=options.events,
            seed=seed,
            seconds=options.seconds,
            folder=folder / f"{kind}-children",
        )
        once = found.applied == found.operations == found.reservations == options.events and not found.dead_letters
        fine = fine and once
        print(f"{kind}: {'each operation exactly once' if once else 'NOT EXACTLY ONCE'}: {found}", flush=True)
    return fine


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000, help="operations on each broker")
    parser.add_argument("--seed", type=int, help="repeats the decisions of a run")
    parser.add_argument("--seconds", type=float, default=1800.0, help="longest time of one broker")
    parser.add_argument("--only", nargs="+", choices=("kafka", "rabbitmq"), default=["kafka", "rabbitmq"])
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.ExitStack() as stacked:
        held = main(arguments(), stacked)
    sys.exit(0 if held else 1)
