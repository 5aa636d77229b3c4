"""PgQueuer under chaos as its documentation says to run it; `install`, `fill` (rows as JSON lines on stdin), or `work`.

Runs in an environment of its own. Jobs are retried in the database by its own executor, taken over by its heartbeat, and
held where they failed for good; a worker whose connection failed is started again by its own supervisor. Handlers do what
fencepost's do, as far as it has it: a stable key for a provider that honours one, a look-up before each request where the
provider has look-ups, and the result in one commit.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from bench.chaos.plan import EFFECT_SECONDS, EFFECTS, LEASE, QUIET, chance, computing, subject

SEED = int(os.environ.get("CHAOS_SEED", "0"))
DSN = os.environ["CHAOS_DATABASE"]
PROVIDER = urlsplit(os.environ.get("CHAOS_PROVIDER", "http://127.0.0.1:9"))
CONCURRENCY = int(os.environ.get("CHAOS_CONCURRENCY", "8"))
SAVE = """INSERT INTO chaos_result (operation, class, attempt, generation, computed_by, receipts)
VALUES ($1, $2, $3, $4, $3, $5)"""


def ask(method: str, path: str, key: str, body: dict[str, object] | None = None) -> tuple[int, Any]:
    """One request, never repeated here."""
    conn = http.client.HTTPConnection(PROVIDER.hostname or "", PROVIDER.port, timeout=EFFECT_SECONDS)
    try:
        conn.request(method, path, None if body is None else json.dumps(body), {"Idempotency-Key": key})
        answer = conn.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if answer.status in (200, 201) else None
    finally:
        conn.close()


def effect(operation: str, effect_key: str, kind: str) -> str:
    """The receipt of an effect; whatever is not one is raised, and the job is tried again."""
    about = subject(operation, effect_key)
    key = str(uuid5(NAMESPACE_URL, about))
    if kind == "lookup":
        status, found = ask("GET", f"/receipts/{key}", key)
        if status == 200:
            return str(found["receipt"])
        if status != 404:
            raise RuntimeError(f"the look-up answered {status}")
    status, found = ask("POST", f"/effects/{kind}", key, {"subject": about, "kind": kind})
    if status != 201:
        raise RuntimeError(f"the provider answered {status}")
    return str(found["receipt"])


async def handled(pool: Any, job: Any) -> None:
    """As `app.run`, without a fence, a record of effects, and staged results."""
    given = json.loads(job.payload)
    operation, name = given["operation"], job.entrypoint
    if given["bad"]:
        raise ValueError("bad input")

    def drawn(about: str) -> float:
        return chance(SEED, about, operation, job.attempts)

    def stumble(where: str) -> None:
        if drawn(where) < 0.06:
            raise RuntimeError("the handler failed")

    await asyncio.sleep(computing(SEED, operation, job.attempts))
    receipts: list[str] = []
    for key, kind in EFFECTS[name]:
        stumble(f"before {key}")
        receipts.append(await asyncio.to_thread(effect, operation, key, kind))
    stumble("before publishing")
    if name == QUIET:
        return
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute(SAVE, operation, name, f"{job.id}:{job.attempts}:{os.getpid()}", job.attempts, receipts)
        if drawn("slow publication") < 0.02:
            await conn.execute("SELECT pg_sleep(0.3)")


@asynccontextmanager
async def made() -> AsyncIterator[Any]:
    """The manager, with every class as an entrypoint that is retried in the database."""
    import asyncpg  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from pgqueuer import PgQueuer  # type: ignore[import-not-found,unused-ignore]
    from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found,unused-ignore]
    from pgqueuer.executors import (  # type: ignore[import-not-found,unused-ignore]
        DatabaseRetryEntrypointExecutor,
    )

    connection = await asyncpg.connect(DSN, timeout=5)
    try:
        async with asyncpg.create_pool(DSN, min_size=1, max_size=CONCURRENCY, timeout=5, command_timeout=10) as pool:
            manager: Any = PgQueuer(AsyncpgDriver(connection))

            def executor(parameters: Any) -> Any:
                return DatabaseRetryEntrypointExecutor(
                    parameters=parameters,
                    max_attempts=30,
                    initial_delay=timedelta(seconds=0.05),
                    max_delay=timedelta(seconds=0.5),
                )

            async def handler(job: Any) -> None:
                await handled(pool, job)

            for name in EFFECTS:
                manager.entrypoint(name, executor_factory=executor, on_failure="hold")(handler)
            yield manager
    finally:
        connection.terminate()


async def work() -> None:
    """Until SIGTERM."""
    import pgqueuer  # type: ignore[import-not-found,unused-ignore]

    await pgqueuer.run(
        made,
        dequeue_timeout=timedelta(seconds=0.5),
        batch_size=max(1, CONCURRENCY // 2),
        max_concurrent_tasks=CONCURRENCY,
        heartbeat_timeout=timedelta(seconds=LEASE),
        shutdown_on_listener_failure=True,
        restart_on_failure=True,
        restart_delay=timedelta(seconds=0.2),
    )


async def queries() -> Any:
    """Its own queries over a connection."""
    import asyncpg  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found,unused-ignore]
    from pgqueuer.queries import Queries  # type: ignore[import-not-found,unused-ignore]

    return Queries(AsyncpgDriver(await asyncpg.connect(DSN)))


async def install() -> None:
    """Its schema."""
    await (await queries()).install()


async def fill() -> None:
    """One job for each row."""
    rows = [json.loads(line) for line in sys.stdin]
    found = await queries()
    names = [row["class"] for row in rows]
    payloads = [json.dumps({"operation": row["operation"], "bad": row["bad"]}).encode() for row in rows]
    await found.enqueue(names, payloads, [0] * len(rows), dedupe_key=[row["operation"] for row in rows])


asyncio.run({"install": install, "fill": fill, "work": work}[sys.argv[1]]())
