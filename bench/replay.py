"""How fast a topic becomes a projection, killed once in the middle: each event once, and nothing else can be caused.

Fills a topic with envelopes as a relay writes them, runs `fencepost replay` under the projector's login, kills it with SIGKILL
half way, runs it again, and compares the projection with what was written. Ends with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "compose"), str(ROOT / "tests")]

from confluent_kafka import Producer

from fencepost.schemas import kafka_binding
from fencepost.schemas.content import binding
from fencepost.schemas.digest import digest
from fencepost.schemas.identity import uuid7
from stack.obtain import obtain_kafka, obtain_postgres
from support.database import Databases
from support.processes import wait_for
from support.roles import Roles, separated
from support.services import Kafka

RATE = 15_000
BYTES = 200
TYPE = "bench.counted"
TENANT = "bench"
SECONDS_MAX = 600.0
POSITION = "SELECT coalesce(sum(position - first), 0) FROM sums_shadow.sums_replay"
TABLES = "CREATE TABLE sums (account text PRIMARY KEY, events bigint NOT NULL, amount bigint NOT NULL)"


def fill(kafka: Kafka, topic: str, count: int, accounts: int) -> dict[str, tuple[int, int]]:
    """Writes the events, every account in one partition of its own order; what the projection must say of them."""
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True, "linger.ms": 20, "log_level": 0}
    )
    encode = kafka_binding.encoder("urn:fencepost:bench")
    expected: dict[str, tuple[int, int]] = {}
    for n in range(1, count + 1):
        account, operation = f"account-{n % accounts}", f"operation-{n}"
        raw = b'{"n":%d,"amount":%d,"note":"' % (n, n % 97)
        raw += b"x" * (BYTES - len(raw) - 2) + b'"}'
        headers = encode(
            uuid7(),
            TYPE,
            1,
            TENANT,
            operation,
            account,
            1,
            digest(TENANT, operation, TYPE, 1, 1, binding(raw)).raw,
            n,
            datetime.now(UTC),
        )
        while True:
            try:
                producer.produce(
                    topic,
                    value=raw,
                    key=kafka_binding.key(TENANT, account),
                    headers=[*headers],
                    partition=n % accounts % 4,
                )
                break
            except BufferError:
                producer.poll(0.1)
        if n % 1000 == 0:
            producer.poll(0)
        events, amount = expected.get(account, (0, 0))
        expected[account] = (events + 1, amount + n % 97)
    if producer.flush(60):
        raise SystemExit("Kafka did not take every event")
    return expected


def login(roles: Roles) -> str:
    """The address for the projector's login, owner of the projection's table."""
    made = roles.login("projector")
    name = roles.name("projector")
    with roles.database.connect(autocommit=True) as conn:
        conn.execute(TABLES.encode())
        conn.execute(f"ALTER TABLE sums OWNER TO {name}".encode())
        conn.execute(f"GRANT CREATE ON SCHEMA public TO {name}".encode())
        conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {name}".encode())
    return made.dsn


def start(dsn: str, kafka: Kafka, topic: str, handler: str, *more: str) -> subprocess.Popen[str]:
    """The command, as an operator would run it."""
    destinations = [
        {"name": "bench", "kind": "kafka", "address": kafka.bootstrap, "routes": [{"match": "*", "to": topic}]}
    ]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fencepost.operate.cli",
            "replay",
            f"replay_app:{handler}",
            "--topic",
            topic,
            "--json",
            *more,
        ],
        cwd=ROOT / "bench",
        env={**os.environ, "FENCEPOST_DATABASE": dsn, "FENCEPOST_DESTINATIONS": json.dumps(destinations)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measure(roles: Roles, kafka: Kafka, count: int, accounts: int) -> Iterator[str]:
    """What was missed, one line each."""
    topic = kafka.topic(4)
    began = time.monotonic()
    expected = fill(kafka, topic, count, accounts)
    print(f"filled {count} events of {BYTES} B for {accounts} keys in {time.monotonic() - began:.0f} s", flush=True)
    dsn = login(roles)
    with roles.database.connect(autocommit=True) as conn:

        def position() -> int:
            if conn.execute("SELECT to_regclass('sums_shadow.sums_replay')").fetchone() == (None,):
                return 0
            row = conn.execute(POSITION.encode()).fetchone()
            return int(row[0]) if row else 0

        began = time.monotonic()
        first = start(dsn, kafka, topic, "sums")
        here = wait_for(lambda: (time.monotonic(), position()) if position() else None, 60, "the first events")
        wait_for(lambda: position() >= count // 2 or None, SECONDS_MAX, "half of the events")
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=20)
        killed, at = time.monotonic() - began, position()
        steady = (at - here[1]) / (began + killed - here[0])
        print(f"killed after {killed:.1f} s at {at}: {steady:.0f} events/s once it read", flush=True)
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        out, err = start(dsn, kafka, topic, "sums").communicate(timeout=SECONDS_MAX)
        went_on = time.monotonic() - began
        if not out:
            yield f"the replay ended with: {err.strip()}"
            return
        done: dict[str, Any] = json.loads(out)
        rate = count / (killed + went_on)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        each = cpu / (count - at) * 1e6
        print(f"its own time on a processor: {each:.0f} us for an event, its start included", flush=True)
        print(
            f"went on and swapped after {went_on:.1f} s: {(count - at) / went_on:.0f} events/s, its start included",
            flush=True,
        )
        print(
            f"all: {rate:.0f} events/s, two starts and one swap included; digests verified: {done['applied']}",
            flush=True,
        )
        if not done["swapped"] or (done["applied"], done["older"], done["held"]) != (count, 0, 0):
            yield f"not every event was applied once: {done}"
        found = {r[0]: (r[1], r[2]) for r in conn.execute("SELECT account, events, amount FROM sums").fetchall()}
        if found != expected:
            yield "the projection's sums are not those of the events"
        if rate < RATE:
            yield f"{rate:.0f} events/s, at least {RATE} are wanted"
        refused = start(dsn, kafka, topic, "attempting", "--drop-old")
        _, err = refused.communicate(timeout=60)
        print(f"the handler that submits a job: exit code {refused.returncode}: {err.strip()}", flush=True)
        jobs = conn.execute("SELECT count(*) FROM fencepost.job").fetchone()
        if refused.returncode != 1 or roles.role("projector") not in err or jobs != (0,):
            yield "a handler could cause something"


def main() -> int:
    """Runs it with real services; 1 when a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--accounts", type=int, default=1_000)
    chosen = parser.parse_args()
    with ExitStack() as opened, tempfile.TemporaryDirectory() as folder:
        postgres = obtain_postgres("18")
        opened.callback(postgres.close)
        broker = obtain_kafka()
        opened.callback(broker.close)
        kafka = Kafka(broker.address, broker.version, True, broker.node)
        print(f"{postgres.label}, {broker.label}, {os.cpu_count()} cores", flush=True)
        roles = opened.enter_context(separated(Databases(postgres.address, Path(folder))))
        missed = list(measure(roles, kafka, chosen.count, chosen.accounts))
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
