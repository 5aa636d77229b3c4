"""One measured piece of work in a process of its own; the last line it prints is its result as JSON.

`python child.py KIND JSON`. Everything is bounded in count and in time; CPU is that of this process alone.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, LiteralString, Self, cast

import aio_pika
import psycopg
from confluent_kafka import KafkaError, Message, Producer

from fencepost.relay.destination import Destination, source
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import OutboxRow, Outcome, Outgoing, Publisher, Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.relay.sidecar import Relay, settle_memory
from fencepost.schemas import amqp_binding, kafka_binding

READ: LiteralString = """
SELECT o.slot, o.seq, o.event_id::text, o.tenant, o.operation, o.type, o.version, o.epoch, o.ordering_key, o.digest,
       to_char(o.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), o.content_type, o.attributes::text, o.payload, o.reference
FROM fencepost.outbox AS o WHERE o.slot = %(slot)s AND o.seq > %(seq)s ORDER BY o.seq LIMIT %(rows)s"""
SLOTS = 16
READ_ROWS = 2000
SERVE_EVERY = 100
RABBIT_WINDOW = 500
RECORDS = 20_000

Record = tuple[bytes, bytes, list[tuple[str, str | bytes | None]]]
Options = Mapping[str, Any]


def producer(bootstrap: str, options: Options) -> Producer:
    """The settings of the relay's own client, warmed up."""
    made = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "queue.buffering.max.messages": 50_000,
            **options,
        }
    )
    made.list_topics(timeout=10)
    return made


class Reports:
    """Counts delivery reports; any failure ends the run."""

    def __init__(self) -> None:
        self.confirmed = 0

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise SystemExit(f"a record was not delivered: {error.name()}")
        self.confirmed += 1


def produce(made: Producer, topic: str, records: Iterator[Record], reports: Reports) -> None:
    """As fast as the client takes them, with a poll for each hundred."""
    send, poll = made.produce, made.poll
    for n, (key, value, headers) in enumerate(records):
        while True:
            try:
                send(topic, value, key, on_delivery=reports, headers=headers)
                break
            except BufferError:
                poll(0.005)
        if n % SERVE_EVERY == 0:
            poll(0)


def finish(made: Producer, reports: Reports, count: int, seconds: float) -> None:
    """Waits for the last reports."""
    until = time.monotonic() + seconds
    while reports.confirmed < count:
        if time.monotonic() > until:
            raise SystemExit(f"only {reports.confirmed} of {count} confirmed in time")
        made.poll(0.01)


def rows_of(dsn: str, limit: int) -> Generator[list[OutboxRow]]:
    """The backlog slot by slot, without snapshots, ticks or positions that are kept anywhere."""
    left = limit
    with psycopg.connect(dsn, autocommit=True) as conn, conn.cursor(binary=True) as cursor:
        for slot in range(SLOTS):
            seq = 0
            while left > 0:
                cursor.execute(READ, {"slot": slot, "seq": seq, "rows": min(READ_ROWS, left)})
                found = [OutboxRow._make(row) for row in cursor.fetchall()]
                if not found:
                    break
                seq = found[-1].seq
                left -= len(found)
                yield found


def records_of(rows: Sequence[OutboxRow], encode: kafka_binding.Encoder) -> Iterator[Record]:
    """The very bytes that the relay sends."""
    for r in rows:
        headers = encode(
            r.event_id,
            r.type,
            r.version,
            r.tenant,
            r.operation,
            r.ordering_key,
            r.epoch,
            r.digest,
            r.seq,
            r.recorded_at,
        )
        yield (
            kafka_binding.key(r.tenant, r.ordering_key),
            r.payload,
            cast("list[tuple[str, str | bytes | None]]", headers),
        )


def source_of(dsn: str) -> str:
    """The CloudEvents source of the installation."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        return source(conn)


def kafka_raw(o: Options) -> dict[str, float]:
    """Limit (a): the same bytes with the same headers and a delivery callback for each, made before the clock starts."""
    encode = kafka_binding.encoder(source_of(o["dsn"]))
    rows = [row for found in rows_of(o["dsn"], min(RECORDS, o["count"])) for row in found]
    records = list(records_of(rows, encode))
    made, warm, reports = producer(o["bootstrap"], o["client"]), Reports(), Reports()
    produce(made, o["topic"], iter(records[:1]), warm)
    finish(made, warm, 1, 10)
    with Clock() as clock:
        produce(made, o["topic"], (records[n % len(records)] for n in range(o["count"])), reports)
        finish(made, reports, o["count"], o["seconds"])
    return clock.result(o["count"])


def kafka_read(o: Options) -> dict[str, float]:
    """Limit (b): reads the same rows and produces the same bytes, and records nothing at all."""
    encode = kafka_binding.encoder(source_of(o["dsn"]))
    made, warm, reports = producer(o["bootstrap"], o["client"]), Reports(), Reports()
    produce(made, o["topic"], records_of(next(rows_of(o["dsn"], 1)), encode), warm)
    finish(made, warm, 1, 10)
    count = 0
    with Clock() as clock:
        for rows in rows_of(o["dsn"], o["count"]):
            produce(made, o["topic"], records_of(rows, encode), reports)
            count += len(rows)
        finish(made, reports, count, o["seconds"])
    return clock.result(count)


async def _rabbit(o: Options, batches: Iterator[list[OutboxRow]]) -> dict[str, float]:
    encode = amqp_binding.encoder(source_of(o["dsn"]))

    def messages() -> Generator[aio_pika.Message]:
        for rows in batches:
            for r in rows:
                headers = encode(
                    r.event_id,
                    r.type,
                    r.version,
                    r.tenant,
                    r.operation,
                    r.ordering_key,
                    r.epoch,
                    r.digest,
                    r.seq,
                    r.recorded_at,
                    None,
                    r.reference,
                )
                yield aio_pika.Message(
                    r.payload,
                    headers=dict(headers),
                    content_type="application/json",
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                    message_id=str(r.event_id),
                    timestamp=datetime.fromisoformat(r.recorded_at),
                )

    connection = await aio_pika.connect(o["url"])
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    waiting = messages()
    sent = 0

    async def work() -> None:
        nonlocal sent
        for message in waiting:
            await channel.default_exchange.publish(message, o["queue"], mandatory=True)
            sent += 1

    if o["ready"]:
        waiting = iter(list(waiting))  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    with Clock() as clock:
        async with asyncio.timeout(o["seconds"]):
            await asyncio.gather(*(work() for _ in range(RABBIT_WINDOW)))
    await connection.close()
    return clock.result(sent)


def rabbit_raw(o: Options) -> dict[str, float]:
    """Limit (a): aio-pika with 500 confirms outstanding, messages made before the clock starts."""
    return asyncio.run(_rabbit({**o, "ready": True}, rows_of(o["dsn"], o["count"])))


def rabbit_read(o: Options) -> dict[str, float]:
    """Limit (b): the same, reading the rows and making the messages on the way."""
    return asyncio.run(_rabbit({**o, "ready": False}, rows_of(o["dsn"], o["count"])))


class Timed:
    """A publisher that notes when the first send began and, where wanted, when each event was confirmed."""

    def __init__(self, inner: Publisher, *, each: bool = False) -> None:
        self._inner = inner
        self._each = each
        self.began: Clock | None = None
        self.confirmed: dict[str, float] = {}

    def open(self, deadline: float) -> None:
        self._inner.open(deadline)

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        if self.began is None:
            self.began = Clock()
            self.began.__enter__()
        future = self._inner.send(batch, deadline)
        if self._each:
            operations = [event.row.operation for event in batch]
            future.add_done_callback(lambda _: self.confirmed.update(dict.fromkeys(operations, time.monotonic())))
        return future

    def close(self, deadline: float) -> None:
        self._inner.close(deadline)


def made_relay(o: Options, *, each: bool = False) -> tuple[Relay, list[Timed]]:
    """The relay as it is deployed, with the settings it comes with unless the options say otherwise."""
    timed: list[Timed] = []

    def make(source_name: str) -> Publisher:
        inner: Publisher
        if o["kind"] == "kafka":
            inner = KafkaPublisher(o["bootstrap"], source=source_name, delivery_timeout=8.0)
        else:
            inner = RabbitPublisher(o["url"], source=source_name)
        timed.append(Timed(inner, each=each))
        return timed[-1]

    # As `fencepost relay run` does.
    settle_memory()
    route = Route("*", o["topic"]) if o["kind"] == "kafka" else Route("*", "", o["queue"])
    return Relay(o["dsn"], [Destination("bench", o["kind"], [route], make)], pace=Pace(**o.get("pace", {}))), timed


def relay_drain(o: Options) -> dict[str, float]:
    """(c): the relay on a backlog, from its first send until everything is confirmed and recorded."""
    statements = Statements()
    relay, timed = made_relay(o)
    thread = threading.Thread(target=relay.run, daemon=True)
    until = time.monotonic() + o["seconds"]
    thread.start()
    while (done := relay.loops[0].counters.published) < o["count"]:
        if time.monotonic() > until or not thread.is_alive():
            raise SystemExit(f"only {done} of {o['count']} relayed in time")
        time.sleep(0.02)
    assert timed[0].began is not None
    timed[0].began.__exit__(None, None, None)
    result = timed[0].began.result(done)
    counted, acks, pages = statements.count, relay.loops[0].counters.acks, relay.loops[0].counters.pages
    relay.stop()
    thread.join(20)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result | {"statements": counted, "acks": acks, "pages": pages, "memory": memory}


def relay_idle(o: Options) -> dict[str, float]:
    """A relay with nothing to do: statements a second after it has settled."""
    statements = Statements()
    relay, _ = made_relay(o)
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    time.sleep(3)
    before, cpu, began = statements.count, time.process_time(), time.monotonic()
    time.sleep(o["seconds"])
    spent = time.monotonic() - began
    result = {"rate": (statements.count - before) / spent, "cpu": (time.process_time() - cpu) / spent}
    relay.stop()
    thread.join(20)
    return result


def relay_follow(o: Options) -> dict[str, Any]:
    """A relay that notes the time of each confirm until the parent closes its standard input."""
    relay, timed = made_relay(o, each=True)
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    print("running", flush=True)
    sys.stdin.read()
    relay.stop()
    thread.join(20)
    return {"confirmed": timed[0].confirmed if timed else {}, "published": relay.summary().published}


class Clock:
    """Wall time and CPU time of this process."""

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.monotonic() - self._wall, time.process_time() - self._cpu

    def result(self, count: int) -> dict[str, float]:
        """Events a second and microseconds of CPU for each."""
        return {"rate": count / self.wall, "cpu": self.cpu / count * 1e6, "count": count}


class Statements:
    """Counts what this process asks of PostgreSQL, BEGIN and COMMIT included."""

    def __init__(self) -> None:
        self.count = 0
        connection, cursor = cast(Any, psycopg.Connection), cast(Any, psycopg.Cursor)
        execute, command = cursor.execute, connection._exec_command

        def counted_execute(this: object, *arguments: Any, **named: Any) -> Any:
            self.count += 1
            return execute(this, *arguments, **named)

        def counted_command(this: object, *arguments: Any, **named: Any) -> Any:
            self.count += 1
            return command(this, *arguments, **named)

        cursor.execute, connection._exec_command = counted_execute, counted_command


KINDS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "kafka_raw": kafka_raw,
    "kafka_read": kafka_read,
    "rabbitmq_raw": rabbit_raw,
    "rabbitmq_read": rabbit_read,
    "relay_drain": relay_drain,
    "relay_idle": relay_idle,
    "relay_follow": relay_follow,
}

if __name__ == "__main__":
    print(json.dumps(KINDS[sys.argv[1]](json.loads(sys.argv[2]))), flush=True)
