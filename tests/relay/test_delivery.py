"""Settling one batch: bounded in sends as well as in time, whatever the broker answers."""

import threading

from conformance.harness import event
from fencepost.relay.answers import Told
from fencepost.relay.delivery import Delivery
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, ParkReason, Route
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


def test_an_event_sent_again_after_a_later_one_of_its_key_was_confirmed_is_told_as_overtaken() -> None:
    """The memory broker does not withhold here, as Kafka cannot withhold what it has taken already."""
    silent = {2}

    def once_silent(row: OutboxRow) -> Outcome:
        if row.seq in silent:
            silent.remove(row.seq)
            return Outcome(Answer.UNKNOWN, detail="cut")
        return Outcome(Answer.CONFIRMED)

    broker = MemoryBroker(once_silent, withholding=False)
    batch = [
        event(ANYWHERE, 1),
        event(ANYWHERE, 2),
        event(ANYWHERE, 3, "other"),
        event(ANYWHERE, 4),
        event(ANYWHERE, 5),
    ]
    control = delivery(MemoryBroker(), threading.Event()).deliver(batch)
    assert (control.published, control.overtaken) == (5, [])

    settled = delivery(broker, threading.Event()).deliver(batch)

    assert (settled.published, settled.resent, settled.unresolved) == (5, 1, [])
    assert [(o.row.seq, o.overtaken_by) for o in settled.overtaken] == [(2, 5)]


def test_an_overtaken_event_that_is_refused_in_the_end_says_so_where_it_is_parked() -> None:
    answers = {2: [Outcome(Answer.UNKNOWN), Outcome(Answer.REFUSED, ParkReason.TOO_LARGE)]}

    def later_refused(row: OutboxRow) -> Outcome:
        return answers[row.seq].pop(0) if row.seq in answers else Outcome(Answer.CONFIRMED)

    settled = delivery(MemoryBroker(later_refused, withholding=False), threading.Event()).deliver(
        [event(ANYWHERE, 1), event(ANYWHERE, 2), event(ANYWHERE, 3)]
    )

    assert [(p.row.seq, p.reason, p.overtaken_by) for p in settled.parked] == [(2, ParkReason.TOO_LARGE, 3)]
    assert (settled.published, settled.overtaken) == (2, [])


def test_everything_that_a_confirmed_event_overtook_says_so_where_it_is_parked() -> None:
    answers = {1: Outcome(Answer.REFUSED, ParkReason.TOO_LARGE), 2: Outcome(Answer.UNKNOWN)}

    def verdict(row: OutboxRow) -> Outcome:
        return answers.get(row.seq, Outcome(Answer.CONFIRMED))

    settled = delivery(MemoryBroker(verdict, withholding=False), threading.Event()).deliver(
        [event(ANYWHERE, 1), event(ANYWHERE, 2), event(ANYWHERE, 3), event(ANYWHERE, 4, "other")]
    )

    found = [(p.row.seq, p.reason, p.overtaken_by) for p in settled.parked]
    assert found == [(1, ParkReason.TOO_LARGE, 3), (2, ParkReason.BEHIND, 3)]


def test_an_overtaken_event_without_an_answer_is_told_too() -> None:
    stop = threading.Event()

    def never(row: OutboxRow) -> Outcome:
        return Outcome(Answer.UNKNOWN) if row.seq == 1 else Outcome(Answer.CONFIRMED)

    settled = delivery(MemoryBroker(never, withholding=False), stop).deliver(
        [event(ANYWHERE, 1), event(ANYWHERE, 2)], patience=0.1
    )

    assert [item.row.seq for item in settled.unresolved] == [1]
    assert [(o.row.seq, o.overtaken_by) for o in settled.overtaken] == [(1, 2)]
