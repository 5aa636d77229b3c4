"""A process that does the relay's work and dies of SIGKILL where the sources say `Crash here:`; nothing in them knows of it.

Run with `Orders` as its only argument, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import CodeType, FrameType
from typing import Any, Literal

from crash.points import points
from fencepost.relay import backfill
from fencepost.relay.backfill import Chosen
from fencepost.relay.destination import Destination
from fencepost.relay.kafka import KafkaPublisher
from fencepost.relay.pace import Pace
from fencepost.relay.parking import RetryPolicy
from fencepost.relay.publisher import Publisher, Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.relay.sidecar import Relay
from fencepost.schemas.connect import connect

Act = Literal["kill", "stop", "break"]

BATCH = 40
AHEAD = 2
# Small batches, so that every point falls into the middle of the work. The lease outlives each test: tests end it themselves.
PACE = Pace(
    lease=30.0,
    refresh=0.1,
    confirm=12.0,
    poll_max=0.02,
    drain=4.0,
    batch=BATCH,
    ahead=AHEAD,
    retry=RetryPolicy(base=0.05, cap=0.1),
)
DELIVERY_SECONDS = 10.0
WINDOW = 50


@dataclass(frozen=True, slots=True)
class Orders:
    """What to serve, and what to do (`acts`) when a label is reached for the n-th time.

    `recycling`: look for what can be recycled all the time. `after`: backfill from the number behind this one, instead
    of relaying.
    """

    dsn: str
    kind: str
    address: str
    to: str
    routing_key: str
    acts: dict[str, tuple[int, Act]] = field(default_factory=dict[str, tuple[int, Act]])
    recycling: bool = False
    after: int | None = None

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


def watch(acts: Mapping[str, tuple[int, Callable[[str], None]]]) -> None:
    """Calls the act when the statement behind its label is about to run for the n-th time, in whatever thread."""
    found = points()
    labels = {(str(found[label].file), found[label].line): label for label in acts}
    reached: Counter[str] = Counter()
    concerned: dict[CodeType, bool] = {}
    counting = threading.Lock()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        label = labels.get((frame.f_code.co_filename, frame.f_lineno)) if event == "line" else None
        if label is not None:
            with counting:
                reached[label] += 1
                number = reached[label]
            wanted, act = acts[label]
            if number == wanted:
                act(label)
        return line

    def call(frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if code not in concerned:
            # A comprehension has frames of its own, and would count once for each of its items.
            concerned[code] = not code.co_name.startswith("<") and any(
                (code.co_filename, number) in labels for _, _, number in code.co_lines()
            )
        return line if concerned[code] else None

    threading.settrace(call)
    sys.settrace(call)


def kill(label: str) -> None:
    os.write(1, f"killed at [{label}]\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def main(orders: Orders) -> None:
    publishers: list[Publisher] = []

    def make(source: str) -> Publisher:
        made: Publisher
        if orders.kind == "kafka":
            made = KafkaPublisher(orders.address, source=source, delivery_timeout=DELIVERY_SECONDS)
        else:
            made = RabbitPublisher(orders.address, source=source)
        publishers.append(made)
        return made

    def broken(_: str) -> None:
        """What an error does that librdkafka calls fatal."""
        for publisher in publishers:
            assert isinstance(publisher, KafkaPublisher)
            client = publisher._clients.current  # pyright: ignore[reportPrivateUsage]
            assert client is not None
            client.broken = True

    destination = Destination("events", orders.kind, [Route("*", orders.to, orders.routing_key)], make)
    pace = replace(PACE, record=0.0, recycle=0.02) if orders.recycling else PACE
    relay = Relay(orders.dsn, [destination], pace=pace)
    does: dict[str, Callable[[str], None]] = {"kill": kill, "stop": lambda _: relay.stop(), "break": broken}
    if orders.acts:
        watch({label: (number, does[act]) for label, (number, act) in orders.acts.items()})
    if orders.after is None:
        signal.signal(signal.SIGTERM, lambda signum, frame: relay.stop())
        relay.run()
    else:
        send_again(orders.dsn, destination, orders.after)


def send_again(dsn: str, destination: Destination, after: int) -> None:
    backfill.WINDOW = WINDOW
    with connect(dsn, autocommit=True) as conn:
        span = backfill.resolve(conn, destination.name, Chosen(after + 1))
        destination.open(conn, time.monotonic() + PACE.confirm)
        try:
            for at in backfill.send(conn, span, destination, pace=PACE, stop=threading.Event()):
                print("up to", at.position, flush=True)
        finally:
            destination.close(time.monotonic() + PACE.confirm)


if __name__ == "__main__":
    main(Orders(**json.loads(sys.argv[1])))
