"""What a delivery report of Kafka says about one event."""

from __future__ import annotations

from confluent_kafka import KafkaError

from fencepost.relay.publisher import Answer, Outcome, ParkReason

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
