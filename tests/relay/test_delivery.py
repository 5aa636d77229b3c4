"""Settling one batch: bounded in sends as well as in time, whatever the broker answers."""

import threading

from conformance.harness import event
from fencepost.relay.answers import Told
from fencepost.relay.delivery import Delivery
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, Route
from support.memory_broker import MemoryBroker

ANYWHERE = Route("*", "anywhere")


def _quiet(_: str) -> None:
    """Says nothing."""


def _nack(_: OutboxRow) -> Outcome:
    return Outcome(Answer.NACKED)


def delivery(
    broker: MemoryBroker, stop: threading.Event, *, confirm_seconds: float = 1, seconds_left: float = 60
) -> Delivery:
    return Delivery(
        broker,
        confirm_seconds=confirm_seconds,
        seconds_left=lambda: seconds_left,
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


def test_answers_that_come_after_their_deadline_are_looked_at_all_the_same() -> None:
    # Else the publisher would withhold their keys for ever.
    broker = MemoryBroker()
    made = delivery(broker, threading.Event(), confirm_seconds=-0.9)
    answered, late = Told(), Told()
    answered.set_result([CONFIRMED])
    assert made.answered(answered, 1) == [CONFIRMED] and answered.told  # the control
    assert [outcome.answer for outcome in made.answered(late, 1)] == [Answer.UNKNOWN]
    late.set_result([CONFIRMED])
    assert late.told


def test_nothing_is_sent_whose_confirm_could_come_after_the_lease() -> None:
    broker = MemoryBroker()
    control = delivery(broker, threading.Event(), seconds_left=1.1).deliver([event(ANYWHERE, 1)])
    assert not control.unresolved and broker.sends == 1

    settled = delivery(broker, threading.Event(), seconds_left=0.9).deliver([event(ANYWHERE, 2)])

    assert [item.row.seq for item in settled.unresolved] == [2]
    assert broker.sends == 1
