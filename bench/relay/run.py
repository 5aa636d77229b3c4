"""What the relay costs beside the limits of this machine, measured in the same run and interleaved.

Each block prints what it measured; absolute numbers belong to this machine, ratios and counts do not. `--gate` ends
with 1 when a bound is missed. Loads are bounded in count and in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

import aio_pika
import psycopg
from bench.relay import stage
from bench.relay.child import producer
from confluent_kafka import KafkaError, Message

from fencepost.relay import outbox
from fencepost.schemas.event import Event
from stack.obtain import Obtained, obtain_kafka, obtain_postgres, obtain_rabbitmq
from stack.process import Unavailable
from support.database import Database, Databases
from support.proxy import Proxy

SIZES = (200, 1024)
CLIENT = {"linger.ms": "2"}
RATE = 500
DELAY_SECONDS = 0.02
# Small enough that waiting, not this machine, is what limits five relays.
BATCH = 16
PARTS = ("kafka", "rabbitmq", "drain", "idle", "latency", "pinned", "scaling", "peers")
PEER_EVENTS = 40_000
PEER_PACKAGES = ("txoutbox==0.2.2", "asyncpg", "confluent-kafka==2.16.1", "aio-pika==10.2.1")


class Followed(Event, type="bench.followed", version=1):
    """An event whose confirm is timed."""

    n: int
    pad: str = "x" * 130


@dataclass(slots=True)
class Report:
    """Lines as they are measured, and the bounds that were missed."""

    missed: list[str] = field(default_factory=list[str])

    def say(self, text: str) -> None:
        """One measured line."""
        print(text, flush=True)

    def bound(self, what: str, value: float, limit: float, *, least: bool, form: str = ".2f") -> None:
        """One measured value beside its bound."""
        fine = value >= limit if least else value <= limit
        sign = ">=" if least else "<="
        self.say(f"    {'holds ' if fine else 'MISSED'}  {what}: {value:{form}} ({sign} {limit:{form}})")
        if not fine:
            self.missed.append(what)


@dataclass(slots=True)
class Bench:
    """One run over services that were obtained once."""

    options: argparse.Namespace
    report: Report
    opened: contextlib.ExitStack
    databases: Databases

    def database(self) -> Database:
        """A database of its own."""
        made = self.databases.migrated()
        self.opened.callback(self.databases.drop, made)
        return made

    def service(self, name: str, obtain: Callable[[], Obtained[Any]]) -> str | None:
        """The address of a broker, or None with a loud line."""
        try:
            found = obtain()
        except Unavailable as error:
            self.report.say(f"NOT MEASURED, no {name}: {error}")
            self.report.missed.append(f"{name} is missing")
            return None
        self.opened.callback(found.close)
        self.report.say(f"to {found.label}")
        return found.address


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


async def declare(url: str, queue: str, *, drop: bool = False) -> None:
    """A quorum queue, or none any more."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    if drop:
        await channel.queue_delete(queue)
    else:
        await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
    await connection.close()


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


async def arrivals(url: str, queue: str, count: int) -> list[tuple[str, str]]:
    """Key and sequence of all that is in the queue, in order."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=500)
    found: list[tuple[str, str]] = []
    source = await channel.get_queue(queue)
    async with asyncio.timeout(60), source.iterator() as messages:
        async for message in messages:
            found.append((str(message.headers["ce-partitionkey"]), str(message.headers["ce-sequence"])))
            await message.ack()
            if len(found) >= count:
                break
    await connection.close()
    return found


def in_order(found: Sequence[tuple[str, str]]) -> bool:
    """Whether first arrivals of each key came in the order of the sequence."""
    seen: set[str] = set()
    newest: dict[str, str] = {}
    for key, sequence in found:
        if sequence not in seen and sequence < newest.get(key, ""):
            return False
        seen.add(sequence)
        newest[key] = max(sequence, newest.get(key, ""))
    return True


def scaling(bench: Bench, url: str) -> None:
    """One, two and five relays behind a proxy that adds 20 ms to each confirm."""
    rates: dict[int, float] = {}
    ordered = True
    with Proxy(port_of(url)) as proxy:
        proxy.delay(DELAY_SECONDS / 2)
        address = url.replace(f":{port_of(url)}", f":{proxy.port}")
        for relays in (1, 2, 5):
            database = bench.database()
            queue = f"bench-{uuid.uuid4().hex[:12]}"
            asyncio.run(declare(url, queue))
            pace = {"batch": BATCH, "ahead": 1, "poll_max": 0.05, "refresh": 0.3}
            options = {"kind": "rabbitmq", "dsn": database.dsn, "url": address, "queue": queue, "pace": pace}
            children = [stage.started("relay_follow", options) for _ in range(relays)]
            for child in children:
                assert child.stdout is not None
                child.stdout.readline()
            shared(database, relays)
            count = 1500 * relays
            stage.fill(database, count, SIZES[0], keys=4000)
            try:
                asyncio.run(arrived(url, queue, count))
                time.sleep(1)
                found = [stage.result(child, 60) for child in children]
            finally:
                for child in children:
                    child.kill()
            times = sorted(at for one in found for at in one["confirmed"].values())
            # The middle of the run: neither the start nor the end, where slots run dry one after the other.
            low, high = int(len(times) * 0.1), int(len(times) * 0.8)
            rates[relays] = (high - low) / (times[high] - times[low])
            got = asyncio.run(arrivals(url, queue, count))
            ordered = ordered and in_order(got) and len({sequence for _, sequence in got}) == count
            asyncio.run(declare(url, queue, drop=True))
    bench.report.say(
        f"with {DELAY_SECONDS * 1000:.0f} ms more for each confirm (batches of {BATCH}, one ahead): "
        + ", ".join(f"{n} relay{'s' if n > 1 else ''} {rate:,.0f}/s" for n, rate in rates.items())
    )
    bench.report.bound("two relays to one", rates[2] / rates[1], 1.8, least=True)
    bench.report.bound("five relays to one", rates[5] / rates[1], 4.0, least=True)
    bench.report.bound("keys in order, nothing missing", float(ordered), 1.0, least=True, form=".0f")


def shared(database: Database, relays: int) -> None:
    """Waits until every relay has its share of the slots."""
    until = time.monotonic() + 60
    with database.connect(autocommit=True) as conn:
        while True:
            row = conn.execute(
                "SELECT count(DISTINCT owner), coalesce(max(n), 0), coalesce(min(n), 0) FROM"
                " (SELECT owner, count(*) AS n FROM fencepost.slot WHERE destination = 'bench' AND owner IS NOT NULL"
                " GROUP BY owner) AS s"
            ).fetchone()
            assert row is not None
            if row[0] == relays and row[1] - row[2] <= 1:
                return
            if time.monotonic() > until:
                raise SystemExit("the relays did not share the slots in time")
            time.sleep(0.1)


async def arrived(url: str, queue: str, count: int) -> None:
    """Waits until the queue holds everything."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    try:
        async with asyncio.timeout(120):
            while True:
                found = await channel.declare_queue(queue, passive=True)
                if (found.declaration_result.message_count or 0) >= count:
                    break
                await asyncio.sleep(0.2)
    finally:
        await connection.close()


def port_of(url: str) -> int:
    """The port of an address."""
    return int(url.rpartition("@")[2].partition("/")[0].rpartition(":")[2])


def peers(bench: Bench, bootstrap: str) -> None:
    """txoutbox at its best settings, in an environment of its own."""
    folder = ROOT / ".cache" / "bench-peers"
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEER_PACKAGES],
            check=True,
            timeout=300,
        )
    except (subprocess.SubprocessError, OSError) as error:
        bench.report.say(f"PEERS NOT MEASURED: txoutbox could not be had ({type(error).__name__})")
        bench.report.missed.append("peers are missing")
        return
    theirs = bench.databases.empty()
    bench.opened.callback(bench.databases.drop, theirs)
    ours = bench.database()
    stage.fill(ours, bench.options.events, SIZES[0])
    topic = stage.topic(bootstrap)
    rates: dict[str, list[float]] = {"ordered": [], "unordered": [], "relay": []}
    for _ in range(bench.options.rounds):
        for mode in ("ordered", "unordered"):
            rate = peer(bench, python, [theirs.dsn, bootstrap, topic, str(PEER_EVENTS), mode])
            if rate is None:
                return
            rates[mode].append(rate)
        stage.rewind(ours)
        options = {"dsn": ours.dsn, "count": bench.options.events, "seconds": bench.options.seconds}
        found = stage.measure("relay_drain", kind="kafka", bootstrap=bootstrap, topic=topic, **options)
        rates["relay"].append(float(found["rate"]))
    for name, found_rates in rates.items():
        shown_rates = ", ".join(f"{rate:,.0f}" for rate in found_rates)
        bench.report.say(
            f"{'txoutbox ' if name != 'relay' else ''}{name}: {statistics.median(found_rates):,.0f}/s ({shown_rates})"
        )
    best = max(rates["ordered"], rates["unordered"], key=statistics.median)
    ratio = statistics.median(a / b for a, b in zip(rates["relay"], best, strict=True))
    bench.report.bound("kafka 200 B, relay to txoutbox", ratio, 5.0, least=True, form=".1f")


def peer(bench: Bench, python: Path, arguments: list[str]) -> float | None:
    """One run of txoutbox in its own environment; None, told loudly, when it failed."""
    run = subprocess.run(
        [str(python), str(Path(__file__).with_name("txoutbox_peer.py")), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if run.returncode != 0:
        bench.report.say(f"PEERS NOT MEASURED: {run.stderr.strip().splitlines()[-1:]}")
        bench.report.missed.append("peers are missing")
        return None
    return float(json.loads(run.stdout.strip().splitlines()[-1]))


def main(options: argparse.Namespace, opened: contextlib.ExitStack) -> bool:
    """Runs the parts that were asked for; True when no bound was missed."""
    report = Report()
    parts: list[str] = options.only or [part for part in PARTS if part != "peers" or options.peers]
    report.say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before; Python {sys.version.split()[0]}")
    server = obtain_postgres(options.major)
    opened.callback(server.close)
    report.say(f"on {server.label}")
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-relay-")))
    databases = Databases(server.address, folder)
    opened.callback(databases.close)
    bench = Bench(options, report, opened, databases)
    to_kafka: dict[str, Callable[[Bench, str], None]] = {
        "kafka": kafka,
        "drain": drain,
        "idle": idle,
        "latency": latency,
        "pinned": pinned,
        "peers": peers,
    }
    to_rabbitmq: dict[str, Callable[[Bench, str], None]] = {"rabbitmq": rabbitmq, "scaling": scaling}
    for name, obtain, run in (
        ("Apache Kafka", obtain_kafka, to_kafka),
        ("RabbitMQ", obtain_rabbitmq, to_rabbitmq),
    ):
        wanted = [part for part in parts if part in run]
        address = bench.service(name, obtain) if wanted else None
        if address is not None:
            for part in wanted:
                run[part](bench, address)
    report.say(f"load {os.getloadavg()[0]:.1f} after")
    report.say("every bound holds" if not report.missed else f"{len(report.missed)} MISSED: {'; '.join(report.missed)}")
    return not report.missed


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts instead of all")
    parser.add_argument("--events", type=int, default=200_000, help="backlog of a throughput round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each throughput comparison")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time of one measurement")
    parser.add_argument("--latency-seconds", type=int, default=20, help="length of the latency run")
    parser.add_argument("--pinned-seconds", type=float, default=30.0, help="time of the pinned snapshot")
    parser.add_argument("--full", action="store_true", help="1,000,000 rows, and ten minutes of a pinned snapshot")
    parser.add_argument("--peers", action="store_true", help="also txoutbox, installed into .cache/bench-peers")
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    with contextlib.ExitStack() as stacked:
        held = main(given, stacked)
    sys.exit(0 if held or not given.gate else 1)
