"""A backlog of the largest events passes through a relay whose memory does not grow with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import LiteralString

from support.database import Database
from support.processes import Child
from support.relays import accepted, registered

EVENTS = 400
# At most 16 MiB for each of the four batches on their way and the one being read, and what making them takes.
GROWTH_MIB = 160
MiB = 1 << 20
FILL: LiteralString = """
INSERT INTO fencepost.outbox (child, slot, seq, xid, era, event_id, tenant, operation, type, version, epoch, ordering_key,
    digest, recorded_at, content_type, payload)
SELECT 0, g %% 16, nextval('fencepost.outbox_seq'), pg_current_xact_id(), 1, gen_random_uuid(), 'acme', 'op' || g,
    'relay.changed', 1, 1, 'k' || g, '\\x01'::bytea || sha256('x'), now(), 'application/json',
    convert_to('"' || repeat('x', 1048574) || '"', 'UTF8')
FROM generate_series(1, %(events)s) AS g"""
RELAY = """
import json, pathlib, sys, threading
from concurrent.futures import Future
from fencepost.relay.destination import Destination
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import CONFIRMED
from support.relays import EVERYTHING

class Slow:
    sent = size = 0
    def open(self, deadline): pass
    def close(self, deadline): pass
    def send(self, batch, deadline):
        future = Future()
        self.sent += len(batch)
        self.size += sum(len(item.row.payload) for item in batch)
        threading.Timer(0.1, lambda kept: future.set_result([CONFIRMED] * len(kept)), [list(batch)]).start()
        return future

broker = Slow()
loop = DestinationLoop(sys.argv[1], Destination("memory", "kafka", EVERYTHING, lambda source: broker),
                       pace=Pace(), stop=threading.Event())
def peak():
    "MiB; of this program alone, which the resource usage of a child is not."
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

before = peak()
loop.run(once=True)
print(json.dumps({"sent": broker.sent, "bytes": broker.size, "published": loop.counters.published,
                  "grown_mib": peak() - before}))
"""


def drained(database: Database, folder: Path) -> dict[str, float]:
    """What a relay process with a slow broker did until everything was published."""
    paths = Path(__file__).parents[1], Path(__file__).parents[2] / "compose"
    with Child.script(RELAY, folder=folder, arguments=[database.dsn], PYTHONPATH=":".join(map(str, paths))) as child:
        assert child.wait(120) == 0, child.text
        found: dict[str, float] = json.loads(child.text.splitlines()[-1])
    return found


def test_a_backlog_of_the_largest_events_and_a_slow_broker_do_not_grow_the_relay(
    database18: Database, tmp_path: Path
) -> None:
    registered(database18)
    accepted(database18, "small")
    control = drained(database18, tmp_path / "control")
    assert control["published"] == 1 and control["grown_mib"] < GROWTH_MIB
    with database18.connect(autocommit=True) as conn:
        conn.execute(FILL, {"events": EVENTS})
    found = drained(database18, tmp_path / "large")
    assert (found["sent"], found["published"], found["bytes"]) == (EVENTS, EVENTS, EVENTS * MiB)
    assert found["grown_mib"] < GROWTH_MIB, found
