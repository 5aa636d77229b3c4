"""What the doorbell costs the writers: commits per second of one event each, with every state of it, in one run.

`without`: `enqueue` as it would be without the doorbell. `off`: no relay uses one. `polling`: a relay without it is at
work beside the writers; `awake`: one that uses it. `asleep`: the mark is never taken away, so every commit rings; the
worst case, which lasts for one ring only. Last, what one look at the mark takes, which is all that `off` adds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compose")]

import psycopg

from fencepost.relay import outbox
from fencepost.relay.doorbell import DOZE, LISTEN, Doorbell
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.schemas.event import Event
from stack.obtain import obtain_postgres
from stack.postgres import MAJORS
from support.database import Database, Databases
from support.memory_broker import MemoryBroker
from support.relays import destination

WRITERS = 4
ROUNDS = 3
STATES = ("without", "off", "polling", "awake", "asleep")
AGAINST = {"off": "without", "awake": "polling", "asleep": "off"}
MARK_SECONDS = 600.0
LOOKS = 200_000
LOOK = """
DO $do$
DECLARE v_now timestamptz := clock_timestamp();
BEGIN
    FOR n IN 1 .. %(looks)s LOOP
        IF pg_sequence_last_value('fencepost.doorbell') > (extract(epoch FROM v_now) * 1000000)::bigint THEN
            RAISE EXCEPTION 'nobody sleeps here';
        END IF;
    END LOOP;
END $do$"""
WITHOUT = """
DO $do$
DECLARE v_source text := pg_get_functiondef('fencepost.enqueue'::regproc);
BEGIN
    EXECUTE regexp_replace(v_source, 'IF pg_sequence_last_value.*?END IF;', '');
END $do$"""


class Written(Event, type="bench.written", version=1):
    """What is committed."""


def commits(database: Database, seconds: float) -> float:
    """Commits per second of all writers together."""
    until = time.monotonic() + seconds
    counts = [0] * WRITERS

    def write(number: int) -> None:
        with psycopg.connect(database.dsn) as conn:
            while time.monotonic() < until:
                operation = f"{number}-{counts[number]}"
                outbox.enqueue(conn, Written(tenant="acme", operation=operation, ordering_key=f"w{number}"))
                conn.commit()
                counts[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def look(database: Database) -> float:
    """Microseconds of one look by a writer."""
    with database.connect(autocommit=True) as conn:
        began = time.monotonic()
        conn.execute((LOOK % {"looks": LOOKS}).encode())
        return (time.monotonic() - began) / LOOKS * 1e6


@contextlib.contextmanager
def state(name: str, database: Database) -> Generator[None]:
    """The doorbell in this state."""
    with contextlib.ExitStack() as opened:
        if name == "without":
            with database.connect(autocommit=True) as conn:
                conn.execute(WITHOUT.encode())
        elif name in {"polling", "awake"}:
            opened.enter_context(relaying(database, rung=name == "awake"))
        elif name == "asleep":
            ears = opened.enter_context(database.connect(autocommit=True))
            ears.execute(LISTEN)
            ears.execute(DOZE, {"seconds": MARK_SECONDS})
        yield


@contextlib.contextmanager
def relaying(database: Database, *, rung: bool) -> Generator[None]:
    """A relay to a broker in memory."""
    stop = threading.Event()
    bell = Doorbell(database.dsn, answer=15)
    to = destination(MemoryBroker())
    loop = DestinationLoop(database.dsn, to, pace=Pace(), stop=stop, bell=bell if rung else None)
    thread = threading.Thread(target=loop.run)
    bell.start()
    thread.start()
    try:
        yield
    finally:
        stop.set()
        bell.stop()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each state and round")
    seconds: float = parser.parse_args().seconds
    found: dict[str, list[float]] = {name: [] for name in STATES}
    looks: list[float] = []
    server = obtain_postgres(MAJORS[0])
    try:
        with tempfile.TemporaryDirectory() as folder:
            databases = Databases(server.address, Path(folder))
            for _ in range(ROUNDS):
                for name in STATES:
                    database = databases.migrated()
                    with state(name, database):
                        found[name].append(commits(database, seconds))
                    if name == "off":
                        looks.append(look(database))
                    databases.drop(database)
            databases.close()
    finally:
        server.close()
    rates = {name: statistics.median(found[name]) for name in STATES}
    for name, rate in rates.items():
        other = AGAINST.get(name)
        print(f"{name:8} {rate:8.0f} commits/s" + (f"  {rate / rates[other]:5.2f} of {other}" if other else ""))
    print(f"one look {statistics.median(looks):8.2f} us")


if __name__ == "__main__":
    main()
