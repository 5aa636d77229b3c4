"""Two-session order fuzz: nothing lost, no first arrival of a key out of order, copies only where a relay was hurt.

Writers over real connections commit late, roll back, use savepoints and prepared transactions; writers of a key are
serialised by a row lock and count in their payload. Two relay processes publish to Kafka, whose partitions are the
truth about arrivals. One phase kills relays, one stops a relay past its lease. A writer stays open in another database
during the whole run and one in this database. Then (`--pinned-seconds`) reads and acks are timed under a pinned snapshot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import psycopg
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "compose"), str(ROOT / "tests")]

from fencepost.relay import acks, outbox
from fencepost.relay.destination import Destination
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.relay.pages import PageReader, Part, Progress
from fencepost.relay.publisher import Route
from fencepost.relay.sidecar import Relay
from fencepost.schemas.event import Event
from stack.obtain import obtain_kafka, obtain_mock, obtain_postgres
from stack.process import Unavailable
from support.database import Database, Databases
from support.memory_broker import MemoryBroker
from support.processes import Child, wait_for

DOMAIN = """
CREATE TABLE entity (tenant text, key text, n bigint NOT NULL, PRIMARY KEY (tenant, key));
CREATE TABLE change (tenant text, key text, n bigint, phase text NOT NULL, PRIMARY KEY (tenant, key, n));"""
NEXT = "UPDATE entity SET n = n + 1 WHERE tenant = %(tenant)s AND key = %(key)s RETURNING n"
CHANGE = "INSERT INTO change (tenant, key, n, phase) VALUES (%(tenant)s, %(key)s, %(n)s, %(phase)s)"
LOCK = "SELECT n FROM entity WHERE tenant = %(tenant)s AND key = %(key)s FOR UPDATE"

TENANTS = ("acme", "umbra")
KEYS = 24
WRITERS = 6
PARTITIONS = 4
LATE_SECONDS = 0.6
QUIET_SECONDS = 60.0
BOUND = 1.25
WINDOW = 1000
CONTROL_EVERY = 10

Lane = tuple[str, str]


class Changed(Event, type="fuzz.changed", version=1):
    """The n-th committed change of a key."""

    n: int
    phase: str


class TopicAdmin(Protocol):
    """What is called of the admin client, whose own types leave the futures open."""

    def create_topics(self, new_topics: list[NewTopic], **options: float) -> dict[str, Future[None]]: ...

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> object: ...


# -- writers ------------------------------------------------------------------------------------------------------------


class Writers:
    """Threads that change keys in every shape of transaction until `events` have committed."""

    def __init__(self, dsn: str, rng: random.Random) -> None:
        self._dsn = dsn
        self._rng = rng
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self.commits = 0
        self.events = 0
        self.shapes: Counter[str] = Counter()

    def run(self, phase: str, events: int) -> list[threading.Thread]:
        """Starts the threads of a phase; they end by themselves."""
        until = self.events + events
        threads = [
            threading.Thread(target=self._write, args=(phase, until, random.Random(self._rng.random())), daemon=True)
            for _ in range(WRITERS)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _write(self, phase: str, until: int, rng: random.Random) -> None:
        with psycopg.connect(self._dsn, connect_timeout=10) as conn:
            while self.events < until:
                shape = rng.choices(
                    ("plain", "late", "rollback", "savepoint", "prepared", "unprepared"), (40, 20, 8, 16, 12, 4)
                )[0]
                # Locks: in one order, so that writers never wait in a circle.
                lanes = sorted({self._lane(rng) for _ in range(rng.randint(1, 3))})
                try:
                    written = self._transaction(conn, shape, phase, lanes, rng)
                except psycopg.errors.DeadlockDetected:
                    conn.rollback()
                    continue
                with self._moved:
                    self.commits += 1
                    self.events += written
                    self.shapes[shape] += 1
                    self._moved.notify_all()

    def _lane(self, rng: random.Random) -> Lane:
        return rng.choice(TENANTS), f"k{min(rng.randrange(KEYS), rng.randrange(KEYS))}"

    def _transaction(
        self, conn: psycopg.Connection[Any], shape: str, phase: str, lanes: list[Lane], rng: random.Random
    ) -> int:
        prepared = shape in ("prepared", "unprepared")
        if prepared:
            conn.tpc_begin(conn.xid(1, f"fuzz-{uuid.uuid4().hex}", "b"))
        for tenant, key in lanes:
            conn.execute(LOCK, {"tenant": tenant, "key": key})
        written = 0
        for lane in lanes:
            for _ in range(rng.randint(1, 3)):
                self._change(conn, phase, lane)
                written += 1
                if shape == "savepoint":
                    written += self._nested(conn, phase, lane, rng)
        if prepared:
            conn.tpc_prepare()
        if shape in ("late", "prepared", "unprepared") or rng.random() < 0.1:
            self._wait_for_others(rng.randint(1, 12))
        match shape:
            case "rollback":
                conn.rollback()
                return 0
            case "prepared":
                conn.tpc_commit()
            case "unprepared":
                conn.tpc_rollback()
                return 0
            case _:
                conn.commit()
        return written

    def _nested(self, conn: psycopg.Connection[Any], phase: str, lane: Lane, rng: random.Random) -> int:
        with contextlib.suppress(psycopg.Rollback), conn.transaction() as savepoint:
            self._change(conn, phase, lane)
            if rng.random() < 0.5:
                raise psycopg.Rollback(savepoint)
            return 1
        return 0

    def _change(self, conn: psycopg.Connection[Any], phase: str, lane: Lane) -> None:
        tenant, key = lane
        row = conn.execute(NEXT, {"tenant": tenant, "key": key}).fetchone()
        assert row is not None
        n: int = row[0]
        conn.execute(CHANGE, {"tenant": tenant, "key": key, "n": n, "phase": phase})
        operation = f"{key}-{n}-{uuid.uuid4().hex[:12]}"
        outbox.enqueue(conn, Changed(tenant=tenant, operation=operation, ordering_key=key, n=n, phase=phase))

    def _wait_for_others(self, commits: int) -> None:
        with self._moved:
            until = self.commits + commits
            self._moved.wait_for(lambda: self.commits >= until, LATE_SECONDS)


# -- arrivals -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arrivals:
    """What the broker holds, in the broker's order: per key that is the order of its partition."""

    first: dict[Lane, list[int]] = field(default_factory=dict[Lane, list[int]])
    phase: dict[tuple[Lane, int], str] = field(default_factory=dict[tuple[Lane, int], str])
    wire: dict[tuple[Lane, int], tuple[object, ...]] = field(default_factory=dict[tuple[Lane, int], tuple[object, ...]])
    copies: Counter[str] = field(default_factory=Counter[str])
    altered: int = 0

    def take(self, key: bytes, value: bytes, headers: object) -> None:
        tenant, name = json.loads(key)
        content = json.loads(value)
        lane, n, phase = (tenant, name), int(content["n"]), str(content["phase"])
        wire = (key, value, repr(headers))
        if (lane, n) in self.wire:
            self.copies[phase] += 1
            self.altered += self.wire[lane, n] != wire
            return
        self.wire[lane, n] = wire
        self.phase[lane, n] = phase
        self.first.setdefault(lane, []).append(n)

    @property
    def misordered(self) -> int:
        """First arrivals that came after a later one of their key."""
        return sum(n < max(ns[:i], default=0) for ns in self.first.values() for i, n in enumerate(ns))


class Reader:
    """Reads the topic back, from its beginning, in a thread."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.arrivals = Arrivals()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._settings: dict[str, str | int | bool] = {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        self._consumer = Consumer(self._settings)
        self._parts = [TopicPartition(topic, p, 0) for p in range(partitions)]
        self._consumer.assign(self._parts)
        self._next = dict.fromkeys(range(partitions), 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            for message in self._consumer.consume(500, 0.05):
                if message.error() is not None:
                    continue
                key, value = message.key(), message.value()
                assert isinstance(key, bytes) and value is not None
                with self._lock:
                    self.arrivals.take(key, value, message.headers())
                    self._next[cast(int, message.partition())] = cast(int, message.offset()) + 1

    def missing(self, committed: set[tuple[Lane, int]]) -> int:
        """How many of these have not arrived."""
        with self._lock:
            return len(committed - self.arrivals.wire.keys())

    @property
    def count(self) -> int:
        """Distinct arrivals so far."""
        with self._lock:
            return len(self.arrivals.wire)

    def close(self) -> Arrivals:
        """Everything up to the end of the topic as it stands now."""

        asking = Consumer(self._settings)
        marks = [asking.get_watermark_offsets(p, timeout=15)[1] for p in self._parts]
        asking.close()

        def caught_up() -> bool:
            with self._lock:
                return all(self._next[p.partition] >= high for p, high in zip(self._parts, marks, strict=True))

        wait_for(caught_up, 30, "the end of the topic")
        self._ended.set()
        self._thread.join(10)
        self._consumer.close()
        return self.arrivals


# -- relays -------------------------------------------------------------------------------------------------------------


def serve(dsn: str, bootstrap: str, topic: str, lease: float) -> None:
    """A relay process; ends on SIGTERM and says what it did."""
    # A stall as long as one of these makes copies, rightly, in a clean phase as well.
    pace = Pace(lease=lease, refresh=0.3, confirm=lease * 0.6, poll_min=0.004, poll_max=0.05)

    def make(source: str) -> KafkaPublisher:
        return KafkaPublisher(bootstrap, source=source, delivery_timeout=lease * 0.5)

    relay = Relay(dsn, [Destination("kafka", "kafka", [Route("fuzz.*", topic)], make)], pace=pace)

    def stop(number: int, frame: object) -> None:
        relay.stop()

    signal.signal(signal.SIGTERM, stop)
    print("serving")
    done = relay.run()
    lost = sum(loop.counters.lost_slots for loop in relay.loops)
    print(f"relay: published {done.published}, sent again {done.resent}, acks {done.acks}, refused acks {lost}")


@dataclass(slots=True)
class Relays:
    """Two relay processes over one database."""

    arguments: list[str]
    folder: Path
    children: list[Child] = field(default_factory=list[Child])
    started: int = 0

    def start(self, index: int | None = None) -> None:
        self.started += 1
        child = Child([__file__, "--serve", *self.arguments], output=self.folder / f"relay-{self.started}.out")
        child.start()
        if index is None:
            self.children.append(child)
        else:
            self.children[index] = child

    def kill(self, index: int) -> None:
        """SIGKILL, and a new process at once."""
        self.children[index].kill()
        self.start(index)

    def stop(self) -> None:
        """SIGTERM to all: they finish what they have sent."""
        for child in self.children:
            code = child.terminate(30)
            assert code == 0, f"a relay ended with {code}:\n{child.text[-2000:]}"
            print("  " + next((line for line in child.text.splitlines() if line.startswith("relay:")), "?"))

    def end(self) -> None:
        for child in self.children:
            child.kill()


# -- the run ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fuzz:
    """One run: clean, killed, paused, clean again."""

    database: Database
    bootstrap: str
    partitions: int
    topic: str
    rng: random.Random
    events: int
    kills: int
    lease: float
    folder: Path

    def run(self) -> bool:
        """Prints the result; True when every promise held."""
        with self.database.connect(autocommit=True) as conn:
            conn.execute(DOMAIN)
            conn.cursor().executemany(
                "INSERT INTO entity VALUES (%s, %s, 0)", [(t, f"k{k}") for t in TENANTS for k in range(KEYS)]
            )
            conn.execute("INSERT INTO entity VALUES ('acme', 'slow', 0)")
        writers = Writers(self.database.dsn, self.rng)
        reader = Reader(self.bootstrap, self.topic, self.partitions)
        relays = Relays([self.database.dsn, self.bootstrap, self.topic, str(self.lease)], self.folder)
        try:
            with self._slow_writer():
                for _ in range(2):
                    relays.start()
                phases: list[tuple[str, float, Callable[[], None]]] = [("clean", 0.3, lambda: None)]
                for n in range(self.kills):
                    phases.append(("killed", 0.25 / self.kills, partial(relays.kill, n % 2)))
                phases.append(("paused", 0.2, lambda: self._pause(relays.children[0])))
                phases.append(("clean2", 0.25, lambda: None))
                for name, share, hurt in phases:
                    if not self._phase(name, writers, reader, share, hurt):
                        break
            self._await(reader)
            relays.stop()
        finally:
            relays.end()
        return self._judge(writers, reader.close())

    @contextlib.contextmanager
    def _slow_writer(self) -> Generator[None]:
        """An open writer in this database: its own event waits for it, nothing else does."""
        with self.database.connect() as conn:
            conn.execute(LOCK, {"tenant": "acme", "key": "slow"})
            conn.execute(NEXT, {"tenant": "acme", "key": "slow"})
            conn.execute(CHANGE, {"tenant": "acme", "key": "slow", "n": 1, "phase": "clean2"})
            event = Changed(tenant="acme", operation="slow", ordering_key="slow", n=1, phase="clean2")
            outbox.enqueue(conn, event)
            yield
            conn.commit()

    def _phase(self, name: str, writers: Writers, reader: Reader, share: float, hurt: Callable[[], None]) -> bool:
        """False when something committed has not arrived in time: then there is no need to go on."""
        began = time.monotonic()
        events = max(50, round(self.events * share))
        before = reader.count
        threads = writers.run(name, events)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: reader.count - before >= events * 0.35, QUIET_SECONDS, f"arrivals of phase {name}")
        hurt()
        for thread in threads:
            thread.join(QUIET_SECONDS)
            assert not thread.is_alive(), "a writer hangs"
        settled = self._await(reader)
        print(f"  phase {name}: {reader.count - before} events in {time.monotonic() - began:.1f} s")
        return settled

    def _committed(self) -> set[tuple[Lane, int]]:
        with self.database.connect(autocommit=True) as conn:
            return {((t, k), n) for t, k, n in conn.execute("SELECT tenant, key, n FROM change")}

    def _await(self, reader: Reader) -> bool:
        """Waits until what is committed has arrived; what has not by then is counted as lost at the end."""
        committed = self._committed()
        with contextlib.suppress(AssertionError):
            return wait_for(lambda: reader.missing(committed) == 0, QUIET_SECONDS, "everything committed to arrive")
        return False

    def _pause(self, child: Child) -> None:
        """SIGSTOP until the other relay owns every slot, then SIGCONT."""
        child.pause()
        owners = "SELECT count(DISTINCT owner) = 1 AND count(owner) = count(*) FROM fencepost.slot WHERE destination = 'kafka'"
        try:
            with self.database.connect(autocommit=True) as conn:
                wait_for(lambda: conn.execute(owners).fetchone() == (True,), self.lease * 3 + 10, "the take-over")
        finally:
            child.resume()

    def _judge(self, writers: Writers, arrivals: Arrivals) -> bool:
        committed = self._committed()
        lost = len(committed - arrivals.wire.keys())
        invented = len(arrivals.wire.keys() - committed)
        clean = arrivals.copies["clean"] + arrivals.copies["clean2"]
        hurt = arrivals.copies["killed"] + arrivals.copies["paused"]
        shapes = ", ".join(f"{name} {count}" for name, count in sorted(writers.shapes.items()))
        print(f"  transactions: {shapes}")
        print(f"events committed {len(committed)}")
        print(f"lost {lost}")
        print(f"published without a commit {invented}")
        print(f"misordered first arrivals per key {arrivals.misordered}")
        print(f"duplicates {clean + hurt}: {clean} in clean phases, {hurt} where a relay was killed or lost its lease")
        print(f"copies with other bytes {arrivals.altered}")
        enough = len(committed) >= self.events
        return enough and not (lost or invented or arrivals.misordered or clean or arrivals.altered)


# -- under a pinned snapshot ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Times:
    """Seconds of one kind of statement, with those of a control whose work never changes: the machine's own drift."""

    name: str
    seconds: list[float] = field(default_factory=list[float])
    controls: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def __len__(self) -> int:
        return len(self.seconds)

    @contextlib.contextmanager
    def one(self) -> Generator[list[bool]]:
        """Times the block; kept when it sets the first item."""
        wanted = [False]
        before = time.perf_counter()
        yield wanted
        if wanted[0]:
            self.seconds.append(time.perf_counter() - before)

    @contextlib.contextmanager
    def control(self) -> Generator[None]:
        """Times the block as a control."""
        before = time.perf_counter()
        yield
        self.controls.append((len(self.seconds), time.perf_counter() - before))

    def due(self) -> bool:
        """Whether it is time for a control."""
        return len(self.seconds) >= (self.controls[-1][0] if self.controls else 0) + CONTROL_EVERY

    def judge(self, bound: float) -> bool:
        """Prints the medians of the first and the last window; True when their ratio is within the bound.

        The control only explains a failure: whether the machine itself became slower in the meantime.
        """
        window = max(1, min(WINDOW, len(self) // 3))
        first, last = (statistics.median(part) * 1000 for part in (self.seconds[:window], self.seconds[-window:]))
        early = [spent for at, spent in self.controls if at <= window]
        late = [spent for at, spent in self.controls if at >= len(self) - window]
        drift = statistics.median(late) / statistics.median(early) if early and late else 1.0
        ratio = last / first
        print(
            f"{self.name}: median of the first {window} {first:.3f} ms, of the last {last:.3f} ms, ratio {ratio:.2f}"
            f" (control {drift:.2f}, relative to it {ratio / drift:.2f})"
        )
        return ratio <= bound


def pinned(database: Database, seconds: float, acks_wanted: int, limit: float, bound: float) -> bool:
    """Times page reads and acks while another session holds a snapshot; True when the last are as fast as the first."""
    reads, wrote = Times("read"), Times("ack")
    stop = threading.Event()
    read, record = PageReader.read, acks.record
    with database.connect(autocommit=True) as conn:
        conn.execute("CREATE TABLE control (at timestamptz NOT NULL)")

    def timed_read(self: PageReader, wanted: Mapping[int, tuple[int, Progress]]) -> list[Part]:
        with reads.one() as keep:
            parts = read(self, wanted)
            keep[0] = any(part.rows for part in parts)
        return parts

    def timed_record(conn: psycopg.Connection[Any], *arguments: Any) -> acks.Recorded:
        with wrote.one() as wanted:
            recorded = record(conn, *arguments)
            wanted[0] = recorded.rows > 0
        if wrote.due():
            # The control of acks: one row and a durable commit. That of reads: the first page, again and again.
            with wrote.control():
                conn.execute("INSERT INTO control VALUES (clock_timestamp())")
            first = PageReader(conn, 1)
            with reads.control():
                read(first, {slot: (1, Progress(0, 1, 0)) for slot in range(16)})
        return recorded

    PageReader.read = timed_read  # type: ignore[method-assign]
    acks.record = timed_record  # type: ignore[assignment]
    broker = MemoryBroker()
    loop = DestinationLoop(
        database.dsn,
        Destination("memory", "kafka", [Route("*", "anywhere")], lambda _: broker),
        pace=Pace(poll_min=0.002, poll_max=0.005),
        stop=stop,
    )
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            failed.append(error)
            stop.set()

    def write() -> None:
        pause = seconds / acks_wanted * 0.6
        with psycopg.connect(database.dsn, connect_timeout=10) as conn:
            n = 0
            while not stop.is_set():
                n += 1
                event = Changed(tenant="acme", operation=f"p-{n}", ordering_key=f"p{n % 40}", n=n, phase="pinned")
                outbox.enqueue(conn, event)
                conn.commit()
                # Paced by the acks: one small page each.
                stop.wait(pause)

    began = time.monotonic()
    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in (loop.run, write)]
    try:
        with database.connect() as holder:
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM fencepost.outbox")
            for thread in threads:
                thread.start()
            while not stop.is_set():
                held = time.monotonic() - began
                if (held >= seconds and len(wrote) >= acks_wanted) or held >= limit:
                    break
                stop.wait(0.5)
            held = time.monotonic() - began
            stop.set()
            for thread in threads:
                thread.join(30)
            holder.rollback()
    finally:
        PageReader.read = read  # type: ignore[method-assign]
        acks.record = record
    if failed:
        raise failed[0]
    print(f"under a snapshot pinned for {held:.0f} s: {len(wrote)} acks, {len(reads)} reads")
    fine = held >= seconds and len(wrote) >= acks_wanted
    for times in (reads, wrote):
        fine = times.judge(bound) and fine
    return fine


# -- services ------------------------------------------------------------------------------------------------------------


def create_topic(bootstrap: str, topic: str, real: bool) -> int:
    """Makes the topic; returns its number of partitions."""
    admin = cast(TopicAdmin, AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}))
    if real:
        admin.create_topics([NewTopic(topic, PARTITIONS, 1)], operation_timeout=15)[topic].result(timeout=20)
        return PARTITIONS
    admin.list_topics(topic, timeout=15)
    found = cast(Any, admin.list_topics(topic, timeout=15))
    return len(found.topics[topic].partitions)


def main(arguments: argparse.Namespace, services: contextlib.ExitStack) -> bool:
    seed: int = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    folder = Path(services.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-order-")))
    dsn: str = arguments.postgres
    if not dsn:
        server = obtain_postgres(arguments.major)
        services.callback(server.close)
        dsn = server.address
        print(f"on {server.label}")
    databases = Databases(dsn, folder)
    services.callback(databases.close)
    fine = True
    if not arguments.only_pinned:
        bootstrap, real = arguments.kafka, True
        if not bootstrap:
            try:
                kafka = obtain_kafka()
            except Unavailable as error:
                print(f"REAL KAFKA IS NOT EXERCISED, the mock cluster stands in: {error}")
                kafka, real = obtain_mock(), False  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
            services.callback(kafka.close)
            bootstrap = kafka.address
            print(f"to {kafka.label}")
        topic = f"fuzz-{uuid.uuid4().hex[:12]}"
        partitions = create_topic(bootstrap, topic, real)
        database, other = databases.migrated(), databases.empty()
        services.callback(databases.drop, database)
        services.callback(databases.drop, other)
        # A writer that stays open in another database of this cluster for the whole run.
        with other.connect() as elsewhere:
            elsewhere.execute("CREATE TABLE open_writer ()")
            fuzz = Fuzz(
                database=database,
                bootstrap=bootstrap,
                partitions=partitions,
                topic=topic,
                rng=random.Random(seed),
                events=arguments.events or (400 if arguments.short else 6500),
                kills=1 if arguments.short else 4,
                lease=10.0,
                folder=folder,
            )
            fine = fuzz.run()
            elsewhere.rollback()
    seconds = arguments.pinned_seconds
    if seconds is None:
        seconds = 0.0 if arguments.short else 600.0
    if seconds > 0:
        database = databases.migrated()
        services.callback(databases.drop, database)
        wanted = arguments.pinned_acks or round(seconds * 20_000 / 600 if seconds >= 60 else 2000)
        fine = pinned(database, seconds, wanted, seconds * 1.15 + 20, arguments.bound) and fine
    print("held" if fine else f"BROKEN (seed {seed})")
    return fine


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="repeats the writers' choices; default: random, printed")
    parser.add_argument("--events", type=int, default=0, help="events to commit, at least")
    parser.add_argument("--short", action="store_true", help="the form that the tests run")
    parser.add_argument("--major", default="18", help="PostgreSQL version to obtain")
    parser.add_argument("--postgres", default="", help="address of a PostgreSQL instead, as superuser")
    parser.add_argument("--kafka", default="", help="address of a Kafka instead of obtaining one")
    parser.add_argument("--pinned-seconds", type=float, help="time of the pinned snapshot; 0 leaves that part out")
    parser.add_argument("--pinned-acks", type=int, default=0, help="acks under the pinned snapshot, at least")
    parser.add_argument("--bound", type=float, default=BOUND, help="largest ratio of last to first medians")
    parser.add_argument("--only-pinned", "--pinned", action="store_true", help="only the pinned snapshot")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = options()
    if given.serve:
        serve(given.serve[0], given.serve[1], given.serve[2], float(given.serve[3]))
        sys.exit(0)
    with contextlib.ExitStack() as opened:
        held_up = main(given, opened)
    sys.exit(0 if held_up else 1)
