"""PgQueuer and Procrastinate at the settings that were best for them; the last line printed is the result as JSON.

Runs in an environment of its own: `python peer.py SYSTEM KIND JSON`, with drain, latency, steady or produce as its kind.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

STEP_SECONDS = 0.01
PGQUEUER_BATCH = 100
PROCRASTINATE_CONCURRENCY = 10

Put = Callable[[list[float]], Awaitable[Any]]


class PgQueuer:
    """Claims and completes in batches of a hundred, on asyncpg; woken by notifications."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    async def connection(self) -> Any:
        import asyncpg  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return await asyncpg.connect(self.dsn)

    async def queries(self) -> Any:
        from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found,unused-ignore]
        from pgqueuer.queries import Queries  # type: ignore[import-not-found,unused-ignore]

        return Queries(AsyncpgDriver(await self.connection()))

    async def install(self) -> None:
        await (await self.queries()).install()

    async def putting(self) -> Put:
        queries = await self.queries()
        return lambda times: queries.enqueue(
            ["noop"] * len(times), [repr(at).encode() for at in times], [0] * len(times)
        )

    async def settled(self) -> None:
        await (await self.connection()).execute("VACUUM ANALYZE pgqueuer")

    async def run(self, on_start: Callable[[float], None], *, drain: bool) -> None:
        from pgqueuer import PgQueuer as Peer  # type: ignore[import-not-found,unused-ignore]
        from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found,unused-ignore]
        from pgqueuer.domain.types import QueueExecutionMode  # type: ignore[import-not-found,unused-ignore]

        made: Any = Peer(AsyncpgDriver(await self.connection()))

        async def noop(job: Any) -> None:
            on_start(float(job.payload))

        made.entrypoint("noop")(noop)
        mode: dict[str, Any] = {"mode": QueueExecutionMode.drain} if drain else {}
        await made.qm.run(batch_size=PGQUEUER_BATCH, **mode)


class Procrastinate:
    """Ten jobs at a time on a pool of psycopg connections, finished jobs deleted; woken by notifications."""

    def __init__(self, dsn: str) -> None:
        import procrastinate  # type: ignore[import-not-found,unused-ignore]

        self.app: Any = procrastinate.App(
            connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=4, max_size=20)
        )
        self.on_start: Callable[[float], None] = lambda at: None
        self.dsn = dsn

        async def noop(at: float) -> None:
            self.on_start(at)

        self.noop: Any = self.app.task(name="noop")(noop)

    async def install(self) -> None:
        await self.app.open_async()
        await self.app.schema_manager.apply_schema_async()

    async def putting(self) -> Put:
        return lambda times: self.noop.batch_defer_async(*[{"at": at} for at in times])

    async def opened(self) -> None:
        await self.app.open_async()

    async def settled(self) -> None:
        import psycopg

        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("VACUUM ANALYZE procrastinate_jobs")

    async def run(self, on_start: Callable[[float], None], *, drain: bool) -> None:
        self.on_start = on_start
        options: dict[str, Any] = {"concurrency": PROCRASTINATE_CONCURRENCY, "delete_jobs": "always"}
        await self.app.run_worker_async(wait=not drain, install_signal_handlers=False, **options)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


async def drain(peer: Any, options: dict[str, Any]) -> dict[str, Any]:
    await peer.install()
    put = await peer.putting()
    count = options["count"]
    for first in range(0, count, 500):
        await put([0.0] * min(500, count - first))
    await peer.settled()
    started = 0

    def hit(_at: float) -> None:
        nonlocal started
        started += 1

    began = time.monotonic()
    await asyncio.wait_for(peer.run(hit, drain=True), options["seconds"])
    spent = time.monotonic() - began
    assert started == count, started
    return {"rate": count / spent}


async def latency(peer: Any, options: dict[str, Any]) -> dict[str, Any]:
    await peer.install()
    put = await peer.putting()
    ages: list[float] = []
    task = asyncio.create_task(peer.run(lambda at: ages.append(time.time() - at), drain=False))
    await asyncio.sleep(1)
    count = round(options["seconds"] * options["rate"])
    for _ in range(count):
        await put([time.time()])
        await asyncio.sleep(1 / options["rate"])
    until = time.monotonic() + 10
    while len(ages) < count and time.monotonic() < until:
        await asyncio.sleep(0.05)
    task.cancel()
    return {"ages": ages}


async def steady(peer: Any, options: dict[str, Any]) -> dict[str, Any]:
    if hasattr(peer, "opened"):
        await peer.opened()
    ages: list[tuple[float, float]] = []
    began = time.time()

    def hit(at: float) -> None:
        now = time.time()
        ages.append((now - began, now - at))

    task = asyncio.create_task(peer.run(hit, drain=False))
    await asyncio.sleep(options["seconds"])
    task.cancel()
    return {"ages": ages}


async def produce(peer: Any, options: dict[str, Any]) -> dict[str, Any]:
    if hasattr(peer, "opened"):
        await peer.opened()
    put = await peer.putting()
    each, sent = max(1, round(options["rate"] * STEP_SECONDS)), 0
    began = time.monotonic()
    while time.monotonic() - began < options["seconds"]:
        await put([time.time()] * each)
        sent += each
        await asyncio.sleep(max(0.0, began + sent / options["rate"] - time.monotonic()))
    return {"sent": sent}


async def install(peer: Any, _options: dict[str, Any]) -> dict[str, Any]:
    await peer.install()
    return {}


KINDS = {"install": install, "drain": drain, "latency": latency, "steady": steady, "produce": produce}
SYSTEMS: dict[str, Any] = {"pgqueuer": PgQueuer, "procrastinate": Procrastinate}


async def main() -> None:
    logging.disable(logging.CRITICAL)
    system, kind, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    found = await KINDS[kind](SYSTEMS[system](options["dsn"]), options)
    sys.stdout.write(json.dumps({**found, "version": version(system)}) + "\n")
    sys.stdout.flush()
    # Their tasks are left as they are: what was to be measured is measured.
    import os

    os._exit(0)


asyncio.run(main())
