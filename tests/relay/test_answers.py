"""Answers of a send: complete exactly once, first come first served; a failure stops its key until the caller knows."""

import threading

from conformance.harness import event
from fencepost.relay.answers import Answers, StoppedKeys, key_of
from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, ParkReason, Route

ROUTE = Route("*", "anywhere")
NACKED = Outcome(Answer.NACKED)


def answers(count: int, number: int = 1) -> Answers:
    return Answers(number, [event(ROUTE, seq, f"k{seq}") for seq in range(count)], 0.0)


def test_a_send_is_complete_with_its_last_confirm_in_whatever_order() -> None:
    sent = answers(3)
    for index in (2, 0):
        sent.confirm(index)
        assert not sent.done
    sent.confirm(1)
    assert sent.future.result(0) == [CONFIRMED] * 3


def test_other_answers_keep_their_place_between_confirms() -> None:
    sent = answers(3)
    sent.answer(1, NACKED)
    sent.answer(1, Outcome(Answer.REFUSED, ParkReason.TOO_LARGE))
    sent.confirm(2)
    sent.confirm(0)
    assert sent.future.result(0) == [CONFIRMED, NACKED, CONFIRMED]


def test_what_has_no_answer_becomes_unknown_and_a_late_confirm_changes_nothing() -> None:
    sent = answers(3)
    sent.confirm(2)
    sent.give_up("over")
    seen = list(sent.future.result(0))
    assert [outcome.answer for outcome in seen] == [Answer.UNKNOWN, Answer.UNKNOWN, Answer.CONFIRMED]
    sent.confirm(0)
    sent.answer(1, NACKED)
    assert sent.future.result(0) == seen


def test_confirms_from_several_threads_complete_it_once() -> None:
    count = 4000
    sent = answers(count)
    calls: list[int] = []
    sent.future.add_done_callback(lambda _: calls.append(1))

    def work(first: int) -> None:
        for index in range(first, count, 4):
            if index % 5:
                sent.confirm(index)
            else:
                sent.answer(index, NACKED)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert calls == [1]
    assert sent.future.result(0) == [CONFIRMED if index % 5 else NACKED for index in range(count)]


def test_a_key_stays_stopped_for_sends_made_before_the_caller_knew() -> None:
    stopped = StoppedKeys()
    failed = answers(1, number=1)
    key = key_of(failed.batch[0])
    assert key not in stopped.keys  # the allowed control
    failed.answer(0, NACKED)
    stopped.stop(key, failed)
    stopped.sending(2)
    failed.future.result(0)
    # Made before the caller looked, handed over after: still withheld.
    stopped.reached(2)
    assert key in stopped.keys
    stopped.sending(3)
    stopped.reached(2)
    assert key in stopped.keys
    stopped.reached(3)
    assert key not in stopped.keys
