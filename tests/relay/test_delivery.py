"""Settling one batch: bounded in sends as well as in time, whatever the broker answers."""

import threading

from conformance.harness import event
from fencepost.relay.delivery import Delivery
from fencepost.relay.publisher import Answer, OutboxRow, Outcome, Route
from support.memory_broker import MemoryBroker

ANYWHERE = Route("*", "anywhere")


def _quiet(_: str) -> None:
    """Says nothing."""


def _nack(_: OutboxRow) -> Outcome:
    return Outcome(Answer.NACKED)


def delivery(broker: MemoryBroker, stop: threading.Event) -> Delivery:
    return Delivery(
        broker,
        confirm_seconds=1,
        seconds_left=lambda: 60,
        keep=lambda: {0},
        stop=stop,
        drain_seconds=1,
        on_trouble=_quiet,
    )


def test_a_broker_that_says_no_at_once_is_not_hammered_while_draining() -> None:
    stop = threading.Event()
    broker = MemoryBroker()
    assert not delivery(broker, stop).deliver([event(ANYWHERE, 1)]).unresolved  # the control
    broker.verdict = _nack
    broker.sends = 0
    stop.set()

    settled = delivery(broker, stop).deliver([event(ANYWHERE, 2)])

    assert [item.row.seq for item in settled.unresolved] == [2]
    assert broker.sends < 30
