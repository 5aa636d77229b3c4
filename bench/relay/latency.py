"""From the commit of an event to its confirm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psycopg
from bench.relay import stage
from bench.relay.child import producer
from bench.relay.report import CLIENT, Bench
from confluent_kafka import KafkaError, Message

from fencepost.relay import outbox
from fencepost.schemas.event import Event

RATE = 500


class Followed(Event, type="bench.followed", version=1):
    """An event whose confirm is timed."""

    n: int
    pad: str = "x" * 130


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return statistics.median(ordered) * 1000, ordered[int(len(ordered) * 0.99)] * 1000


def paced(count: int, step: Callable[[int], None]) -> None:
    """Calls `step` at `RATE` a second, never faster to catch up by more than one second."""
    began = time.monotonic()
    for n in range(count):
        due = began + n / RATE
        now = time.monotonic()
        if now > due + 1:
            began += now - due
        elif now < due:
            time.sleep(due - now)
        step(n)


def raw_latency(bootstrap: str, topic: str, count: int) -> tuple[float, float]:
    """From produce to its delivery report, at the same pace."""
    made = producer(bootstrap, CLIENT)
    spent: list[float] = []

    def step(n: int) -> None:
        began = time.monotonic()

        def report(error: KafkaError | None, message: Message) -> None:
            assert error is None, "a record was not delivered"
            spent.append(time.monotonic() - began)

        made.produce(topic, b"x" * 200, str(n).encode(), on_delivery=report)
        until = began + 1 / RATE
        while (left := until - time.monotonic()) > 0:
            made.poll(left)

    paced(count, step)
    made.flush(20)
    return quantiles(spent[RATE:])


def latency(bench: Bench, bootstrap: str) -> None:
    """From the commit of an event to its confirm, beside a raw produce."""
    database = bench.database()
    topic = stage.topic(bootstrap)
    count = RATE * bench.options.latency_seconds
    raw = raw_latency(bootstrap, topic, count)
    child = stage.started(
        "relay_follow", {"kind": "kafka", "dsn": database.dsn, "bootstrap": bootstrap, "topic": topic}
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "running"
    committed: dict[str, float] = {}
    with psycopg.connect(database.dsn, connect_timeout=10) as conn:

        def step(n: int) -> None:
            event = Followed(tenant="acme", operation=f"f-{n}", ordering_key=f"k{n % 200}", n=n)
            outbox.enqueue(conn, event)
            conn.commit()
            committed[event.operation] = time.monotonic()

        began = time.monotonic()
        paced(count, step)
        rate = count / (time.monotonic() - began)
    time.sleep(2)
    found = stage.result(child, 60)["confirmed"]
    again = raw_latency(bootstrap, topic, count)
    spent = [found[operation] - at for operation, at in list(committed.items())[RATE:] if operation in found]
    if len(spent) < (count - RATE) * 0.99:
        bench.report.say(f"only {len(spent)} of {count - RATE} were confirmed two seconds after the last commit")
        bench.report.missed.append("latency: events without a confirm")
    middle, slow = quantiles(spent)
    slowest = max(raw[1], again[1])
    bench.report.say(f"commit to confirm at {rate:.0f} events/s, ms: median {middle:.1f}, 99 % {slow:.1f}")
    for name, (half, most) in (("before", raw), ("after", again)):
        bench.report.say(f"  raw produce {name}, ms: median {half:.1f}, 99 % {most:.1f}")
    # Fewer than wanted: commits of one writer were too slow here, and the figures are not those of the wanted rate.
    bench.report.bound("events a second that were committed", rate, RATE * 0.9, least=True, form=".0f")
    bench.report.bound("median from commit to confirm, ms", middle, 15, least=False, form=".1f")
    limit = max(100.0, 3 * slowest)
    bench.report.bound("99th percentile from commit to confirm, ms", slow, limit, least=False, form=".1f")
