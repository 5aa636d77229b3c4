"""What the relay relies on, whatever the broker. Oracle: the messages that the broker gives to a consumer."""

import time
from concurrent.futures import wait

import pytest

from conformance.harness import (
    LATE_SECONDS,
    SEND_SECONDS,
    Broker,
    answers,
    event,
    fingerprint,
    ids,
    send,
    send_until_confirmed,
)
from fencepost.relay.publisher import CONFIRMED, Answer, ParkReason, Publisher
from fencepost.schemas.errors import Unreachable


def test_confirmed_events_are_in_the_broker_and_decode_to_their_digest(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    batch = [event(route, seq, f"k{seq % 10}") for seq in range(1, 51)]
    assert send(publisher, batch) == [CONFIRMED] * 50
    arrived = broker.read(route, 50)
    assert sorted(ids(arrived)) == sorted(sent.row.event_id for sent in batch)
    by_id = {sent.row.event_id: sent.row for sent in batch}
    for one in arrived:
        one.envelope.verify()
        row = by_id[one.envelope.id]
        assert (one.envelope.payload, one.envelope.sequence, one.envelope.epoch) == (row.payload, row.seq, row.epoch)
        assert one.envelope.attributes["traceparent"].startswith("00-0af7")


def test_an_empty_batch_is_answered_at_once(publisher: Publisher) -> None:
    assert send(publisher, []) == []


def test_events_of_a_key_arrive_in_order_with_many_sends_in_flight(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    deadline = time.monotonic() + SEND_SECONDS
    batches = [[event(route, s * 25 + i + 1, f"k{i % 5}") for i in range(25)] for s in range(20)]
    futures = [publisher.send(batch, deadline) for batch in batches]
    for future in futures:
        assert future.result(timeout=SEND_SECONDS + LATE_SECONDS) == [CONFIRMED] * 25
    arrived = broker.read(route, 500)
    assert len(arrived) == 500
    for key in {one.envelope.ordering_key for one in arrived}:
        seen = [one.envelope.sequence for one in arrived if one.envelope.ordering_key == key]
        assert seen == sorted(seen)


def test_equal_ordering_keys_of_two_tenants_do_not_hold_each_other(broker: Broker, publisher: Publisher) -> None:
    route, missing = broker.destination(), broker.missing()
    batch = [
        event(missing, 1, "k", tenant="one"),
        event(route, 2, "k", tenant="two"),
        event(route, 3, "k", tenant="one"),
    ]
    assert answers(send(publisher, batch)) == [Answer.REFUSED, Answer.CONFIRMED, Answer.WITHHELD]
    assert [one.envelope.tenant for one in broker.read(route, 1)] == ["two"]


def test_a_missing_destination_is_refused_and_its_neighbours_are_confirmed(
    broker: Broker, publisher: Publisher
) -> None:
    route = broker.destination()
    assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
    missing = broker.missing()
    batch = [event(missing if seq == 5 else route, seq, f"k{seq}") for seq in range(2, 9)]
    outcomes = send(publisher, batch)
    assert answers(outcomes) == [Answer.CONFIRMED] * 3 + [Answer.REFUSED] + [Answer.CONFIRMED] * 3
    assert outcomes[3].reason is broker.features.missing
    assert sorted(one.envelope.sequence for one in broker.read(route, 7)) == [1, 2, 3, 4, 6, 7, 8]
    # Asking again changes nothing: the destination was not created on the way.
    assert send(publisher, [event(missing, 9)])[0].reason is broker.features.missing


def test_an_unroutable_event_is_refused_and_its_neighbours_are_confirmed(broker: Broker, publisher: Publisher) -> None:
    if broker.features.unroutable is None:
        pytest.skip("this broker has no destination that leads nowhere")
    route, nowhere = broker.destination(), broker.nowhere()
    assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
    outcomes = send(publisher, [event(nowhere if seq == 3 else route, seq, f"k{seq}") for seq in (2, 3, 4)])
    assert answers(outcomes) == [Answer.CONFIRMED, Answer.REFUSED, Answer.CONFIRMED]
    assert outcomes[1].reason is broker.features.unroutable
    assert sorted(one.envelope.sequence for one in broker.read(route, 3)) == [1, 2, 4]


def test_an_oversized_event_is_refused_and_its_neighbours_are_confirmed(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    limit = broker.features.limit
    control = [event(route, 1, size=limit - 5_000)]
    assert send(publisher, control) == [CONFIRMED]  # the allowed control
    batch = [event(route, seq, f"k{seq}", size=limit + 1 if seq == 3 else 100) for seq in (2, 3, 4)]
    outcomes = send(publisher, batch)
    assert answers(outcomes) == [Answer.CONFIRMED, Answer.REFUSED, Answer.CONFIRMED]
    assert outcomes[1].reason is ParkReason.TOO_LARGE
    assert len(broker.read(route, 3)) == 3


def test_later_events_of_a_refused_key_are_withheld_and_other_keys_flow(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    big = broker.features.limit + 1
    batch = [event(route, seq, f"k{seq % 2}", size=big if seq == 3 else 100) for seq in range(1, 11)]
    outcomes = send(publisher, batch)
    odd = answers(outcomes[0::2])
    assert odd == [Answer.CONFIRMED, Answer.REFUSED, Answer.WITHHELD, Answer.WITHHELD, Answer.WITHHELD]
    assert answers(outcomes[1::2]) == [Answer.CONFIRMED] * 5
    # The caller has been told: from now on it decides, and the key flows again.
    assert send(publisher, batch[4::2]) == [CONFIRMED] * 3
    arrived = [one.envelope.sequence for one in broker.read(route, 9) if one.envelope.ordering_key == "k1"]
    assert arrived == [1, 5, 7, 9]


def test_a_withheld_event_holds_its_key_until_the_caller_has_looked_at_its_send(
    broker: Broker, publisher: Publisher
) -> None:
    route, missing = broker.destination(), broker.missing()
    deadline = time.monotonic() + SEND_SECONDS
    assert send(publisher, [event(route, 1, "other")]) == [CONFIRMED]  # the allowed control
    first = publisher.send([event(missing, 2)], deadline)
    second = publisher.send([event(route, 3)], deadline)
    assert answers(first.result(SEND_SECONDS)) == [Answer.REFUSED]
    wait([second], SEND_SECONDS)  # answered, and not looked at
    third = publisher.send([event(route, 4), event(route, 5, "other")], deadline)
    assert answers(third.result(SEND_SECONDS)) == [Answer.WITHHELD, Answer.CONFIRMED]
    assert answers(second.result(SEND_SECONDS)) == [Answer.WITHHELD]
    # Now the caller knows of all of them, and the key flows again.
    assert send(publisher, [event(route, 3), event(route, 4)]) == [CONFIRMED] * 2
    arrived = [one.envelope.sequence for one in broker.read(route, 4) if one.envelope.ordering_key == "k"]
    assert arrived == [3, 4]


def test_an_undecodable_row_is_refused_and_its_neighbours_are_confirmed(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    good = [event(route, 1, "a"), event(route, 3, "c")]
    bad = event(route, 2, "b")
    bad = bad._replace(row=bad.row._replace(attributes='["not an object"]'))
    outcomes = send(publisher, [good[0], bad, good[1]])
    assert answers(outcomes) == [Answer.CONFIRMED, Answer.REFUSED, Answer.CONFIRMED]
    assert outcomes[1].reason is ParkReason.UNDECODABLE
    assert len(broker.read(route, 2)) == 2


@pytest.mark.parametrize("column", ["digest", "content_type"])
def test_a_row_of_a_version_that_is_not_known_is_refused_and_its_neighbours_are_confirmed(
    broker: Broker, publisher: Publisher, column: str
) -> None:
    route = broker.destination()
    good = [event(route, 1, "a"), event(route, 3, "c")]
    bad = event(route, 2, "b")
    tag = b"\x02" + bad.row.digest[1:]
    newer = bad.row._replace(digest=tag) if column == "digest" else bad.row._replace(content_type="application/cbor")
    bad = bad._replace(row=newer)
    outcomes = send(publisher, [good[0], bad, good[1]])
    assert answers(outcomes) == [Answer.CONFIRMED, Answer.REFUSED, Answer.CONFIRMED]
    assert outcomes[1].reason is ParkReason.UNKNOWN_VERSION
    assert len(broker.read(route, 2)) == 2


def test_copies_of_an_event_are_identical_to_the_byte(broker: Broker, publisher: Publisher) -> None:
    route = broker.destination()
    batch = [event(route, 1)]
    other = broker.publisher()
    other.open(time.monotonic() + 20)
    try:
        assert send(publisher, batch) == [CONFIRMED]
        assert send(publisher, batch) == [CONFIRMED]
        assert send(other, batch) == [CONFIRMED]
    finally:
        other.close(time.monotonic() + 5)
    arrived = broker.read(route, 3)
    assert len(arrived) == 3
    assert len({fingerprint(one) for one in arrived}) == 1


@pytest.mark.timeout(120)
def test_a_stopped_broker_answers_nothing_and_the_same_bytes_follow_its_recovery(
    broker: Broker, impatient: Publisher
) -> None:
    if not broker.features.pausable:
        pytest.skip("the suite may not stop this broker")
    route = broker.destination()
    assert send(impatient, [event(route, 1, "before")]) == [CONFIRMED]  # the allowed control
    batch = [event(route, seq, f"k{seq % 4}") for seq in range(2, 22)]
    seconds = broker.features.shortest
    took: list[float] = []
    broker.pause()
    try:
        for _ in range(2):
            begun = time.monotonic()
            outcomes = send(impatient, batch, seconds)
            took.append(time.monotonic() - begun)
            assert set(answers(outcomes)) <= {Answer.UNKNOWN, Answer.WITHHELD}
        # At the deadline; one of them may be seen late, on a machine that stood still.
        assert min(took) < seconds + 0.3 and max(took) < seconds + LATE_SECONDS
    finally:
        broker.resume()
    send_until_confirmed(impatient, batch)
    arrived = broker.read(route, 21)
    assert {one.envelope.sequence for one in arrived} == set(range(1, 22))
    copies = {(one.envelope.id, fingerprint(one)) for one in arrived}
    assert len(copies) == 21, "a copy differs"
    first: dict[str, list[int]] = {}
    for one in arrived:
        known = first.setdefault(one.envelope.ordering_key, [])
        if one.envelope.sequence not in known:
            known.append(one.envelope.sequence)
    assert all(seen == sorted(seen) for seen in first.values())


@pytest.mark.timeout(120)
def test_closing_before_a_stopped_broker_answers_leaves_unknown_and_keeps_its_deadline(broker: Broker) -> None:
    if not broker.features.pausable:
        pytest.skip("the suite may not stop this broker")
    route = broker.destination()
    publisher = broker.publisher()
    publisher.open(time.monotonic() + 20)
    assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
    broker.pause()
    try:
        future = publisher.send([event(route, 2)], time.monotonic() + SEND_SECONDS)
        begun = time.monotonic()
        publisher.close(begun + 1)
        assert time.monotonic() - begun < 10
        assert answers(future.result(timeout=0)) == [Answer.UNKNOWN]
    finally:
        broker.resume()


def test_nothing_is_sent_after_close(broker: Broker) -> None:
    route = broker.destination()
    publisher = broker.publisher()
    publisher.open(time.monotonic() + 20)
    assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
    publisher.close(time.monotonic() + 5)
    assert answers(send(publisher, [event(route, 2)])) == [Answer.WITHHELD]
    assert [one.envelope.sequence for one in broker.read(route, 1)] == [1]


def test_close_waits_for_confirms_that_are_on_their_way(broker: Broker) -> None:
    route = broker.destination()
    publisher = broker.publisher()
    publisher.open(time.monotonic() + 20)
    future = publisher.send([event(route, seq, f"k{seq}") for seq in range(1, 201)], time.monotonic() + SEND_SECONDS)
    publisher.close(time.monotonic() + SEND_SECONDS)
    assert future.result(timeout=0) == [CONFIRMED] * 200
    assert len(broker.read(route, 200)) == 200


def test_nobody_at_the_address_is_unreachable_within_the_deadline_and_shows_no_password(broker: Broker) -> None:
    publisher = broker.astray()
    begun = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        publisher.open(begun + 2)
    assert time.monotonic() - begun < 15
    assert "SECRET" not in str(caught.value) + repr(caught.value) + repr(publisher)
    assert "127.0.0.1:1" in str(caught.value)
