"""Several relays that share the slots behind a slow broker."""

from __future__ import annotations

import asyncio
import time
import uuid

from bench.relay import stage
from bench.relay.queues import arrivals, arrived, declare, in_order
from bench.relay.report import SIZES, Bench

from support.database import Database
from support.proxy import Proxy

DELAY_SECONDS = 0.02
# Small enough that waiting, not this machine, is what limits five relays.
BATCH = 16


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


def port_of(url: str) -> int:
    """The port of an address."""
    return int(url.rpartition("@")[2].partition("/")[0].rpartition(":")[2])
