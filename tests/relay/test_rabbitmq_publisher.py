"""What only RabbitMQ does: returns, alarms, channels that die, exchanges that vanish, users without rights."""

import contextlib
import time
from collections.abc import Generator, Iterator
from datetime import datetime

import pytest

from conformance.harness import LATE_SECONDS, SOURCE, answers, event, ids, send, send_until_confirmed
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay.publisher import CONFIRMED, Answer, ParkReason, Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.schemas.errors import ConfigError
from stack.rabbitmq import RabbitServer
from support.brokers import held_back
from support.processes import wait_for
from support.proxy import Proxy
from support.services import Rabbit, Services


@pytest.fixture
def rabbit(services: Services) -> Rabbit:
    return services.rabbitmq()


@pytest.fixture
def on(rabbit: Rabbit) -> OnRabbit:
    return OnRabbit(rabbit)


@pytest.fixture
def publisher(on: OnRabbit) -> Iterator[RabbitPublisher]:
    with opened(on.publisher()) as made:
        yield made


@contextlib.contextmanager
def opened(publisher: RabbitPublisher) -> Generator[RabbitPublisher]:
    publisher.open(time.monotonic() + 20)
    try:
        yield publisher
    finally:
        publisher.close(time.monotonic() + 5)


def node_of(rabbit: Rabbit) -> RabbitServer:
    if rabbit.node is None:
        pytest.skip("the broker is not ours to control")
    return rabbit.node


def test_a_returned_event_is_delivered_exactly_once_after_its_binding_exists(
    on: OnRabbit, publisher: RabbitPublisher
) -> None:
    route = on.route("good")
    batch = [
        event(Route("*", route.to, key), seq, f"k{seq}") for seq, key in ((1, "good"), (2, "nowhere"), (3, "good"))
    ]
    outcomes = send(publisher, batch)
    assert answers(outcomes) == [Answer.CONFIRMED, Answer.REFUSED, Answer.CONFIRMED]
    assert outcomes[1].reason is ParkReason.UNROUTABLE
    again = batch[1]._replace(route=Route("*", route.to, "good"))
    assert send(publisher, [again]) == [CONFIRMED]
    assert ids(on.read(route, 3)) == [batch[0].row.event_id, batch[2].row.event_id, batch[1].row.event_id]


def test_the_default_exchange_needs_no_declaration(on: OnRabbit, publisher: RabbitPublisher) -> None:
    route = on.route("#")
    assert send(publisher, [event(Route("*", "", route.to), 1)]) == [CONFIRMED]
    assert len(on.read(route, 1)) == 1
    assert send(publisher, [event(Route("*", "", "no-such-queue"), 2)])[0].reason is ParkReason.UNROUTABLE


def test_an_exchange_that_vanishes_in_use_is_blamed_alone(on: OnRabbit, publisher: RabbitPublisher) -> None:
    route, gone = on.destination(), on.destination()
    assert send(publisher, [event(route, 1, "a"), event(gone, 2, "b")]) == [CONFIRMED] * 2  # the allowed control
    on.delete_exchange(gone)
    batch = [event(gone if seq % 7 == 0 else route, seq, f"k{seq}") for seq in range(3, 203)]
    guilty = [sent for sent in batch if sent.route is gone]
    until = time.monotonic() + 30
    left = batch
    while left:
        assert time.monotonic() < until
        outcomes = send(publisher, left)
        for sent, outcome in zip(left, outcomes, strict=True):
            if outcome.answer is Answer.REFUSED:
                assert sent in guilty
                assert outcome.reason is ParkReason.NO_SUCH_EXCHANGE
        left = [
            sent
            for sent, outcome in zip(left, outcomes, strict=True)
            if outcome.answer not in {Answer.CONFIRMED, Answer.REFUSED}
        ]
    assert {one.envelope.sequence for one in on.read(route, len(batch) - len(guilty) + 1)} == {
        1,
        *(sent.row.seq for sent in batch if sent.route is route),
    }


def test_a_full_queue_that_rejects_is_nacked_and_the_event_fits_later(on: OnRabbit, publisher: RabbitPublisher) -> None:
    route = on.route("#", {"x-max-length": 1, "x-overflow": "reject-publish"})
    assert send(publisher, [event(route, 1, "a")]) == [CONFIRMED]  # the allowed control
    late = event(route, 2, "b")
    assert answers(send(publisher, [late])) == [Answer.NACKED]
    assert len(on.read(route, 1)) == 1
    assert send(publisher, [late]) == [CONFIRMED]
    assert ids(on.read(route, 1)) == [late.row.event_id]


def test_the_time_of_the_event_is_the_timestamp_property(on: OnRabbit, publisher: RabbitPublisher) -> None:
    route = on.destination()
    sent = event(route, 1)
    assert send(publisher, [sent]) == [CONFIRMED]
    (arrived,) = on.read(route, 1)
    assert datetime.fromisoformat(sent.row.recorded_at).replace(microsecond=0) in arrived.wire


@pytest.mark.timeout(120)
def test_an_alarm_that_blocks_publishers_cannot_hold_a_send_past_its_deadline(
    rabbit: Rabbit, on: OnRabbit, publisher: RabbitPublisher
) -> None:
    node = node_of(rabbit)
    route = on.destination()
    assert send(publisher, [event(route, 1, "a")]) == [CONFIRMED]  # the allowed control
    batch = [event(route, seq, f"k{seq}") for seq in range(2, 22)]
    node.rabbitmqctl("set_vm_memory_high_watermark", "0")
    try:
        # The command is done before the connections have heard of it.
        wait_for(lambda: held_back(node), 60, "the alarm to reach every connection")
        took: list[float] = []
        for _ in range(2):
            begun = time.monotonic()
            outcomes = send(publisher, batch, 2)
            took.append(time.monotonic() - begun)
            assert set(answers(outcomes)) <= {Answer.UNKNOWN, Answer.WITHHELD}
        # At the deadline; one of them may be seen late, on a machine that stood still.
        assert min(took) < 2.3 and max(took) < 2 + LATE_SECONDS
    finally:
        node.rabbitmqctl("set_vm_memory_high_watermark", "absolute", "1GB")
    send_until_confirmed(publisher, batch)
    assert {one.envelope.sequence for one in on.read(route, 21)} == set(range(1, 22))


@pytest.mark.timeout(120)
def test_connections_closed_by_an_operator_are_made_anew(
    rabbit: Rabbit, on: OnRabbit, publisher: RabbitPublisher
) -> None:
    node = node_of(rabbit)
    route = on.destination()
    assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
    node.rabbitmqctl("close_all_connections", "test")
    send_until_confirmed(publisher, [event(route, 2)], 20)
    assert [one.envelope.sequence for one in on.read(route, 2)] == [1, 2]


@pytest.mark.timeout(120)
def test_a_user_without_write_permission_is_refused_and_other_exchanges_flow(rabbit: Rabbit, on: OnRabbit) -> None:
    node = node_of(rabbit)
    allowed, forbidden = on.destination(), on.destination()
    user = rabbit.name("user")
    node.rabbitmqctl("add_user", user, "secret")
    try:
        node.rabbitmqctl("set_permissions", user, "^$", f"^{allowed.to}$", "^$")
        url = rabbit.url.replace("guest:guest", f"{user}:secret")
        with opened(RabbitPublisher(url, source=SOURCE)) as publisher:
            assert send(publisher, [event(allowed, 1)]) == [CONFIRMED]  # the allowed control
            batch = [event(forbidden if seq == 3 else allowed, seq, f"k{seq}") for seq in (2, 3, 4)]
            left = batch
            refused: list[int] = []
            until = time.monotonic() + 20
            while left:
                assert time.monotonic() < until
                outcomes = send(publisher, left)
                for sent, outcome in zip(left, outcomes, strict=True):
                    if outcome.answer is Answer.REFUSED:
                        assert outcome.reason is ParkReason.NOT_AUTHORISED
                        refused.append(sent.row.seq)
                left = [s for s, o in zip(left, outcomes, strict=True) if o.answer in {Answer.UNKNOWN, Answer.WITHHELD}]
            assert refused == [3]
            assert {one.envelope.sequence for one in on.read(allowed, 3)} == {1, 2, 4}
    finally:
        node.rabbitmqctl("delete_user", user)


def test_a_silent_connection_is_replaced_after_one_missed_deadline(rabbit: Rabbit, on: OnRabbit) -> None:
    host, _, port = rabbit.url.rpartition("@")[2].rstrip("/").partition(":")
    route = on.destination()
    with Proxy(int(port), host) as proxy:
        url = rabbit.url.replace(f"{host}:{port}", f"127.0.0.1:{proxy.port}")
        with opened(RabbitPublisher(url, source=SOURCE)) as publisher:
            assert send(publisher, [event(route, 1)]) == [CONFIRMED]  # the allowed control
            proxy.drop_replies()
            lost = event(route, 2)
            assert answers(send(publisher, [lost], 1)) == [Answer.UNKNOWN]
            proxy.heal()
            send_until_confirmed(publisher, [lost], 20)
            sequences = [one.envelope.sequence for one in on.read(route, 2)]
    # The confirm was lost, not the event: a copy, never a gap.
    assert sequences[:2] == [1, 2]
    assert set(sequences) == {1, 2}


@pytest.mark.parametrize(
    ("refused", "allowed"),
    [
        ("amqp://u:SECRET@broker.example:5672/", "amqp://u:SECRET@127.0.0.1:5672/"),
        ("amqp://u:SECRET@127.0.0.1.example/", "amqp://u:SECRET@localhost/"),
        ("amqps://u:SECRET@broker.example/?no_verify_ssl=1", "amqps://u:SECRET@broker.example/"),
        ("http://u:SECRET@127.0.0.1/", "amqp://u:SECRET@[::1]/"),
    ],
)
def test_an_address_that_shows_credentials_or_trusts_anybody_is_refused(refused: str, allowed: str) -> None:
    assert "SECRET" not in repr(RabbitPublisher(allowed, source=SOURCE))
    with pytest.raises(ConfigError) as caught:
        RabbitPublisher(refused, source=SOURCE)
    assert "SECRET" not in str(caught.value)
    if not refused.startswith("http"):
        RabbitPublisher(refused, source=SOURCE, insecure=True)
