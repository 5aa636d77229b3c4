"""What a delivery report of Kafka says about one event, and which confirmed events overtook an unconfirmed one."""

from __future__ import annotations

import threading

from confluent_kafka import KafkaError

from fencepost.relay.answers import OVERTAKEN, Answers, Key, key_of
from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, ParkReason

_REFUSALS: dict[int, ParkReason] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: ParkReason.NOT_AUTHORISED,
    KafkaError.UNKNOWN_TOPIC_OR_PART: ParkReason.NO_SUCH_TOPIC,
    KafkaError._UNKNOWN_TOPIC: ParkReason.NO_SUCH_TOPIC,  # pyright: ignore[reportPrivateUsage]
    KafkaError.TOPIC_EXCEPTION: ParkReason.NO_SUCH_TOPIC,
    KafkaError.INVALID_RECORD: ParkReason.UNDECODABLE,
    KafkaError.INVALID_TIMESTAMP: ParkReason.UNDECODABLE,
}
"""Definite answers about one event. Everything that is not listed is unknown: it may have been stored."""

_INNOCENT = KafkaError._INVALID_DIFFERENT_RECORD  # pyright: ignore[reportPrivateUsage]


def judge(error: KafkaError) -> Outcome:
    """The answer for an event whose report carries this error; sizes are the caller's business."""
    code = error.code()
    if code == _INNOCENT:
        return Outcome(Answer.NACKED, detail="another record of its batch was refused")
    reason = _REFUSALS.get(code)
    if reason is None:
        return Outcome(Answer.UNKNOWN, detail=error.name())
    return Outcome(Answer.REFUSED, reason, error.name())


class Failures:
    """Keys with an event that failed, as long as a send that was made before is unresolved."""

    def __init__(self) -> None:
        self._failed: dict[Key, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def note(self, key: Key, number: int, newest: int) -> None:
        """An event of send `number` failed while `newest` was the last send made."""
        with self._lock:
            self._failed.setdefault(key, (number, newest))

    def mark(self, answers: Answers, outcomes: list[Outcome]) -> None:
        """Marks confirmed events that an earlier, unconfirmed event of their key should have preceded."""
        if not self._failed and outcomes.count(CONFIRMED) == len(outcomes):
            return
        own: set[Key] = set()
        with self._lock:
            failed = self._failed
            for index, outcome in enumerate(outcomes):
                key = key_of(answers.batch[index])
                if outcome.answer is not Answer.CONFIRMED:
                    own.add(key)
                    continue
                first, last = failed.get(key, (answers.number, -1))
                if key in own or first < answers.number <= last:
                    outcomes[index] = outcome._replace(detail=OVERTAKEN)

    def forget(self, oldest: int) -> None:
        """No send before `oldest` is unresolved any more."""
        if self._failed:
            with self._lock:
                self._failed = {key: span for key, span in self._failed.items() if span[1] >= oldest}
