"""One measured piece of work in a process of its own; the last line it prints is its result as JSON.

`python child.py KIND JSON`. Everything is bounded in count and in time; CPU is that of this process alone.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, LiteralString
from uuid import UUID

import psycopg

from fencepost.jobs.claim import Job
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker

Options = Mapping[str, Any]

CLASS = "bench.noop"
LEASE = 30.0
STEP_SECONDS = 0.01

# The least that a queue in PostgreSQL can do: claim a hundred, complete a hundred by the attempts that were claimed.
RAW_CLAIM: LiteralString = """
UPDATE raw_job SET state = 1, attempt = gen_random_uuid(), owner = 'w', lease_until = now() + interval '30 s'
WHERE id IN (SELECT id FROM raw_job WHERE state = 0 AND run_at <= now() ORDER BY run_at, id FOR UPDATE SKIP LOCKED LIMIT %(most)s)
RETURNING id, attempt, payload"""
RAW_COMPLETE: LiteralString = """
UPDATE raw_job AS j SET state = 2 FROM unnest(%(ids)s::bigint[], %(attempts)s::uuid[]) AS u (id, attempt)
WHERE j.id = u.id AND j.attempt = u.attempt AND j.state = 1"""
PRODUCE: LiteralString = """
SELECT count(fencepost.submit('t' || n %% 4, %(name)s || '-' || n, %(class)s, a.args, 'jcs-sha256:' || encode(sha256(a.args), 'hex')))
FROM generate_series(%(first)s::integer, %(last)s::integer) AS n,
LATERAL (SELECT convert_to('{"n":' || n || ',"at":' || (extract(epoch FROM clock_timestamp()) * 1000000)::bigint || '}', 'UTF8') AS args) AS a"""


def raw(options: Options) -> dict[str, Any]:
    """Bare SQL on one connection, no functions."""
    done = 0
    with psycopg.connect(options["dsn"], autocommit=True) as conn, conn.cursor(binary=True) as cursor:
        cursor.execute(RAW_CLAIM, {"most": 0})
        began = time.monotonic()
        while rows := cursor.execute(RAW_CLAIM, {"most": options["batch"]}).fetchall():
            ids: list[int] = [row[0] for row in rows]
            attempts: list[UUID] = [row[1] for row in rows]
            done += cursor.execute(RAW_COMPLETE, {"ids": ids, "attempts": attempts}).rowcount
        spent = time.monotonic() - began
    assert done == options["count"], done
    return {"rate": done / spent}


def drain(options: Options) -> dict[str, Any]:
    """The worker on a backlog of jobs that do nothing; ends when the last is completed and committed."""
    stop = threading.Event()
    lock = threading.Lock()
    count: int = options["count"]
    started = 0
    worker = Worker()

    def hit() -> None:
        nonlocal started
        with lock:
            started += 1
            if started >= count:
                stop.set()

    if options["kind"] == "async":

        @worker.job(CLASS, lease=LEASE)
        async def noop_async(ctx: AsyncContext, job: Job) -> None:
            hit()
    else:

        @worker.job(CLASS, lease=LEASE)
        def noop(ctx: Context, job: Job) -> None:
            hit()

    late = threading.Timer(options["seconds"], stop.set)
    late.daemon = True
    late.start()
    began, used = time.monotonic(), time.process_time()
    worker.run(options["dsn"], concurrency=options["concurrency"], stop=stop)
    spent = time.monotonic() - began
    return {"rate": started / spent, "started": started, "cpu": (time.process_time() - used) / max(started, 1) * 1e6}


def steady(options: Options) -> dict[str, Any]:
    """The worker beside a producer; the age of every job when its handler starts, with the second it started in."""
    stop = threading.Event()
    ages: list[tuple[float, float]] = []
    worker = Worker()

    @worker.job(CLASS, lease=LEASE)
    async def aged(ctx: AsyncContext, job: Job) -> None:
        now = time.time()
        at = job.json()["at"]
        assert isinstance(at, int)
        ages.append((now, now - at / 1e6))

    timer = threading.Timer(options["seconds"], stop.set)
    timer.daemon = True
    began = time.time()
    timer.start()
    worker.run(options["dsn"], concurrency=options["concurrency"], stop=stop)
    return {"ages": [(at - began, age) for at, age in ages]}


def produce(options: Options) -> dict[str, Any]:
    """Submits at a steady rate, so many each hundredth of a second in one transaction."""
    each = max(1, round(options["rate"] * STEP_SECONDS))
    sent = 0
    with psycopg.connect(options["dsn"], autocommit=True) as conn:
        began = time.monotonic()
        while time.monotonic() - began < options["seconds"]:
            values = {"name": options["name"], "class": CLASS, "first": sent, "last": sent + each - 1}
            conn.execute(PRODUCE, values)
            sent += each
            time.sleep(max(0.0, began + sent / options["rate"] - time.monotonic()))
    return {"sent": sent}


def latency(options: Options) -> dict[str, Any]:
    """One job at a time, now and then: from the call that commits, and from the one that submits, to its handler's start."""
    stop = threading.Event()
    committing: dict[str, float] = {}
    ages: list[float] = []
    calls: list[float] = []
    worker = Worker()

    @worker.job(CLASS, lease=LEASE)
    async def aged(ctx: AsyncContext, job: Job) -> None:
        at = job.json()["at"]
        assert isinstance(at, int)
        now = time.time()
        ages.append(now - committing[job.operation])
        calls.append(now - at / 1e6)

    how = {"concurrency": options["concurrency"], "doorbell": options["doorbell"]}
    runs = threading.Thread(target=lambda: worker.run(options["dsn"], stop=stop, **how))
    runs.start()
    time.sleep(1)
    count = round(options["seconds"] * options["rate"])
    with psycopg.connect(options["dsn"]) as conn:
        for number in range(count):
            at, operation = round(time.time() * 1e6), f"{options['name']}-{number}"
            submit(conn, CLASS, tenant="t", operation=operation, args={"at": at})
            committing[operation] = time.time()
            conn.commit()
            time.sleep(1 / options["rate"])
    until = time.monotonic() + 10
    while len(ages) < count and time.monotonic() < until:
        time.sleep(0.05)
    stop.set()
    runs.join(30)
    assert len(ages) == count, (len(ages), count)
    return {"ages": ages, "calls": calls}


KINDS = {"raw": raw, "drain": drain, "steady": steady, "produce": produce, "latency": latency}


def main() -> None:
    """Runs one kind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = KINDS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps(found))


main()
