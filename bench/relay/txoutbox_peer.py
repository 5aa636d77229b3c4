"""txoutbox on a backlog, at the settings that were best for it; prints the rate as JSON.

Runs in an environment of its own (`run.py --peers`): arguments are DSN, bootstrap, topic, count, ordered or unordered.
The publish function is ours, since the library asks for one: confluent-kafka, one future for each delivery report.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import asyncpg  # type: ignore[import-not-found,import-untyped,unused-ignore]
from confluent_kafka import Producer
from txoutbox import Relay, RelayConfig  # type: ignore[import-not-found,unused-ignore]
from txoutbox.adapters.postgres import PostgresStorage  # type: ignore[import-not-found,unused-ignore]

PAYLOAD = json.dumps({"order_id": 12345, "customer": "c-0123456789", "note": "x" * 140}).encode()


def url(dsn: str) -> str:
    """A connection string of key=value pairs as an address."""
    parts = dict(pair.split("=", 1) for pair in dsn.split())
    user, host = quote(parts.get("user", "")), parts.get("host", "127.0.0.1")
    secret = f":{quote(parts['password'].strip(chr(39)))}" if "password" in parts else ""
    return f"postgresql://{user}{secret}@{host}:{parts.get('port', '5432')}/{parts['dbname']}"


async def one(dsn: str, producer: Any, topic: str, count: int, ordered: bool) -> float:
    pool: Any = await asyncpg.create_pool(url(dsn), min_size=2, max_size=10)
    storage: Any = PostgresStorage(pool, strict_ordering=ordered, delete_on_ack=True)
    await pool.execute("DROP TABLE IF EXISTS outbox CASCADE")
    await storage.create_schema()
    await pool.execute(
        "INSERT INTO outbox (topic, key, payload) SELECT $3, 'k' || g, $1 FROM generate_series(1, $2::int) AS g",
        PAYLOAD,
        count,
        topic,
    )
    await pool.execute("VACUUM ANALYZE outbox")
    loop, done, finished = asyncio.get_running_loop(), 0, asyncio.Event()

    async def publish(message: Any) -> None:
        nonlocal done
        future: asyncio.Future[None] = loop.create_future()
        producer.produce(
            message.topic,
            message.payload,
            message.key,
            on_delivery=lambda error, _: loop.call_soon_threadsafe(future.set_result, None),
        )
        await future
        done += 1
        if done >= count:
            finished.set()

    config: Any = RelayConfig(batch_size=1000, concurrency=1000, lease=timedelta(seconds=60))
    relay: Any = Relay(storage, publish, config=config)
    began = time.monotonic()
    task = asyncio.create_task(relay.run())
    await asyncio.wait_for(finished.wait(), 120)
    spent = time.monotonic() - began
    relay.stop()
    await asyncio.wait_for(task, 30)
    await pool.close()
    return count / spent


def main() -> None:
    dsn, bootstrap, topic, count, order = sys.argv[1:6]
    settings = {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 1}
    producer = Producer(settings)
    producer.produce(topic, b"warm")
    producer.flush(10)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            producer.poll(0.05)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    rate = asyncio.run(one(dsn, producer, topic, int(count), order == "ordered"))
    ended.set()
    thread.join(5)
    print(json.dumps(round(rate)))


main()
