"""Events a second beside the limits of this machine, and what a relay at work or at rest costs."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import uuid
from collections.abc import Sequence
from typing import Any

from bench.relay import stage
from bench.relay.queues import declare
from bench.relay.report import CLIENT, SIZES, Bench

from support.database import Database


def median(runs: Sequence[dict[str, Any]], key: str = "rate") -> float:
    """The middle one."""
    return statistics.median(float(run[key]) for run in runs)


def shown(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """One line for what was repeated."""
    rates = [run["rate"] for run in runs]
    spread = f"[{min(rates):,.0f}-{max(rates):,.0f}]"
    return f"  {name:34s} {median(runs):9,.0f}/s {spread:20s} {median(runs, 'cpu'):6.1f} us CPU each"


def ratios(over: Sequence[dict[str, Any]], under: Sequence[dict[str, Any]]) -> float:
    """The median of the ratios of each round: what ran side by side is compared."""
    return statistics.median(float(a["rate"]) / float(b["rate"]) for a, b in zip(over, under, strict=True))


def throughput(bench: Bench, kind: str, database: Database, size: int, count: int, **to: Any) -> None:
    """Raw, read + produce, and the relay in turn, `--rounds` times."""
    report = bench.report
    raw: list[dict[str, Any]] = []
    read: list[dict[str, Any]] = []
    relay: list[dict[str, Any]] = []
    spent = stage.Counters(0, 0)
    common = {"dsn": database.dsn, "count": count, "seconds": bench.options.seconds, **to}
    for turn in range(bench.options.rounds):
        # Each goes first in turn: what comes later finds warmer services.
        for step in range(3):
            match (turn + step) % 3:
                case 0:
                    raw.append(stage.measure(f"{kind}_raw", **common))
                case 1:
                    read.append(stage.measure(f"{kind}_read", **common))
                case _:
                    stage.rewind(database)
                    before = stage.counters(database)
                    relay.append(stage.measure("relay_drain", kind=kind, **common))
                    spent = stage.counters(database).since(before)
    report.say(f"{kind}, {size} B, {count:,} events, {bench.options.rounds} rounds:")
    report.say(shown("a  produce alone", raw))
    report.say(shown("b  read + produce, nothing recorded", read))
    report.say(shown("c  relay", relay))
    to_raw, to_read = ratios(relay, raw), ratios(relay, read)
    last = relay[-1]
    report.say(
        f"  c/a {to_raw:.2f}, c/b {to_read:.2f}; statements for each event {last['statements'] / count:.4f}, for each ack"
        f" {last['statements'] / max(1, last['acks']):.1f}; WAL bytes for each event {spent.wal / count:.1f};"
        f" dead row versions for each event {spent.dead / count:.5f}"
    )
    if kind == "kafka":
        report.bound(f"kafka {size} B, relay to produce alone", to_raw, 0.35, least=True)
        report.bound(f"kafka {size} B, relay to read + produce", to_read, 0.6, least=True)
    else:
        report.bound(f"rabbitmq {size} B, relay to raw aio-pika", to_raw, 0.85, least=True)
    report.bound(
        f"{kind} {size} B, statements for each event", last["statements"] / count, 0.1, least=False, form=".4f"
    )
    report.bound(
        f"{kind} {size} B, dead row versions for each event", spent.dead / count, 0.01, least=False, form=".5f"
    )


def kafka(bench: Bench, bootstrap: str) -> None:
    """Events a second to Kafka."""
    for size in SIZES:
        database = bench.database()
        stage.fill(database, bench.options.events, size)
        throughput(
            bench,
            "kafka",
            database,
            size,
            bench.options.events,
            bootstrap=bootstrap,
            topic=stage.topic(bootstrap),
            client=CLIENT,
        )


def rabbitmq(bench: Bench, url: str) -> None:
    """Events a second to a quorum queue of RabbitMQ."""
    count = max(2000, bench.options.events // 20)
    for size in SIZES:
        database = bench.database()
        stage.fill(database, count, size)
        queue = f"bench-{uuid.uuid4().hex[:12]}"
        asyncio.run(declare(url, queue))
        throughput(bench, "rabbitmq", database, size, count, url=url, queue=queue)
        asyncio.run(declare(url, queue, drop=True))


def drain(bench: Bench, bootstrap: str) -> None:
    """Peak memory of the relay on a large backlog."""
    count = 1_000_000 if bench.options.full else max(bench.options.events, 200_000)
    database = bench.database()
    stage.fill(database, count, SIZES[0], keys=20_000)
    found = stage.measure(
        "relay_drain",
        kind="kafka",
        dsn=database.dsn,
        bootstrap=bootstrap,
        topic=stage.topic(bootstrap),
        count=count,
        seconds=max(300.0, bench.options.seconds),
    )
    bench.report.say(f"drain of {count:,} events of {SIZES[0]} B: {found['rate']:,.0f}/s")
    bench.report.bound("peak memory of the drain, MB", found["memory"] / 1e6, 200, least=False, form=".0f")


def idle(bench: Bench, bootstrap: str) -> None:
    """Statements of a relay that has nothing to do."""
    found = stage.measure(
        "relay_idle",
        kind="kafka",
        dsn=bench.database().dsn,
        bootstrap=bootstrap,
        topic=stage.topic(bootstrap),
        seconds=10.0,
    )
    bench.report.say(f"idle, 16 slots: {found['cpu'] * 100:.1f} % of a core")
    bench.report.bound("statements a second when idle", found["rate"], 20, least=False, form=".1f")


def pinned(bench: Bench, bootstrap: str) -> None:
    """The rate under a snapshot that another session holds, against the rate before and after."""
    database = bench.database()
    stage.fill(database, bench.options.events, SIZES[0])
    topic = stage.topic(bootstrap)
    held_for = 600.0 if bench.options.full else bench.options.pinned_seconds

    def rate() -> float:
        stage.rewind(database)
        found = stage.measure(
            "relay_drain",
            kind="kafka",
            dsn=database.dsn,
            bootstrap=bootstrap,
            topic=topic,
            count=bench.options.events,
            seconds=bench.options.seconds,
        )
        return float(found["rate"])

    without = [rate(), rate()]
    under: list[float] = []
    with contextlib.closing(stage.idle_database(database.dsn)):
        until = time.monotonic() + held_for
        # Ticks, leases and acks go on while the snapshot is held, as in an installation at work.
        while time.monotonic() < until or len(under) < 2:
            under.append(rate())
    without += [rate(), rate()]
    bench.report.say(
        f"snapshot pinned for {held_for:.0f} s: {len(under)} drains, the last two {statistics.mean(under[-2:]):,.0f}/s;"
        f" without {statistics.mean(without):,.0f}/s"
    )
    ratio = statistics.mean(under[-2:]) / statistics.mean(without)
    bench.report.bound("rate under a pinned snapshot to the rate without", ratio, 0.9, least=True)
