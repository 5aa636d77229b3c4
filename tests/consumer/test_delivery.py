"""Delivery identity: two messages are two deliveries, two arrivals of one are one, named by its sender or not."""

from dataclasses import replace

import pytest

from fencepost.consumer.delivery import Delivery
from fencepost.schemas.errors import InvalidInput
from support.deliveries import envelope, from_kafka


def amqp(headers: dict[str, object], body: bytes = b"{}", message_id: str | None = None) -> str:
    return Delivery.from_rabbitmq(
        cluster="c",
        vhost="/",
        queue="q",
        message_id=message_id,
        headers=headers,
        content_type="application/json",
        body=body,
    ).coordinates


def test_messages_without_an_id_are_told_apart_by_their_headers_as_well_as_their_body() -> None:
    assert amqp({"ce-id": "1"}) == amqp({"ce-id": "1"})  # the control
    assert amqp({"ce-id": "1"}) != amqp({"ce-id": "2"})
    assert amqp({"ce-id": "1"}) != amqp({"ce-id": "1"}, b"[]")


def test_what_the_broker_counts_is_no_part_of_a_message_that_has_no_id() -> None:
    assert amqp({"ce-id": "1", "x-delivery-count": 3}) == amqp({"ce-id": "1"})


def test_a_message_with_an_id_is_that_message() -> None:
    assert amqp({"ce-id": "1"}, message_id="m") == amqp({"ce-id": "2"}, message_id="m")


def test_coordinates_that_no_table_can_hold_are_refused_by_name() -> None:
    fine = from_kafka(envelope())
    assert replace(fine, coordinates='["custom", "x"]').coordinates == '["custom", "x"]'  # the control
    for wrong in ("", "x" * 1501, "x\0y"):
        with pytest.raises(InvalidInput) as refused:
            replace(fine, coordinates=wrong)
        assert refused.value.field == "coordinates"
