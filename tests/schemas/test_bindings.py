"""Both brokers carry one envelope unchanged, strictly, and readable by the CloudEvents SDK."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta, timezone

import pytest
from cloudevents.core.bindings import kafka as sdk_kafka
from cloudevents.core.bindings import rabbitmq as sdk_rabbitmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.content import canonical
from fencepost.schemas.envelope import Envelope, to_attributes
from fencepost.schemas.errors import Undecodable
from support.envelopes import an_envelope

TEXT = st.text(alphabet=st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
ENVELOPES = st.builds(
    an_envelope,
    tenant=TEXT,
    operation=TEXT,
    ordering_key=TEXT,
    epoch=st.integers(0, 2**63 - 1),
    sequence=st.integers(0, 2**63 - 1),
    attributes=st.dictionaries(st.from_regex(r"x[a-z0-9]{0,9}", fullmatch=True), TEXT, max_size=3),
    reference=st.none() | TEXT.map(lambda text: f"ref:{text}"),
)


def key_of(envelope: Envelope) -> bytes:
    return kafka_binding.key(envelope.tenant, envelope.ordering_key)


@given(ENVELOPES)
@settings(max_examples=80, deadline=None)
def test_kafka_gives_every_envelope_back(envelope: Envelope) -> None:
    again = kafka_binding.decode(kafka_binding.encode(envelope), key_of(envelope), envelope.payload)

    assert again == envelope
    assert again.verify() == envelope.meaning
    assert kafka_binding.encode(again) == kafka_binding.encode(envelope)


@given(ENVELOPES, st.sampled_from(amqp_binding.PREFIXES))
@settings(max_examples=80, deadline=None)
def test_amqp_gives_every_envelope_back_under_each_prefix(envelope: Envelope, prefix: str) -> None:
    headers, content_type = amqp_binding.encode(envelope)
    renamed = {prefix + name.removeprefix("ce-"): value for name, value in headers.items()}

    assert amqp_binding.decode(renamed, content_type, envelope.payload) == envelope


@given(TEXT, TEXT)
@settings(max_examples=80, deadline=None)
def test_the_key_is_the_canonical_array(tenant: str, ordering_key: str) -> None:
    assert kafka_binding.key(tenant, ordering_key) == canonical([tenant, ordering_key])


def test_no_two_pairs_share_a_key() -> None:
    assert kafka_binding.key('a","b', "c") != kafka_binding.key("a", 'b","c')
    assert json.loads(kafka_binding.key('a"', "é")) == ['a"', "é"]


@given(ENVELOPES)
@settings(max_examples=40, deadline=None)
def test_the_fast_encoder_writes_the_same_headers_from_columns(envelope: Envelope) -> None:
    headers = kafka_binding.encoder(envelope.source)(
        str(envelope.id),
        envelope.type,
        envelope.version,
        envelope.tenant,
        envelope.operation,
        envelope.ordering_key,
        envelope.epoch,
        envelope.digest.raw,
        envelope.sequence,
        envelope.time.astimezone(timezone(timedelta(hours=5, minutes=30))),
        envelope.attributes,
        envelope.reference,
    )

    assert headers == kafka_binding.encode(envelope)
    by_name = {name: value.decode() for name, value in headers}
    assert by_name.pop("content-type") == "application/json"
    assert by_name == {f"ce_{name}": value for name, value in to_attributes(envelope).items()}


@given(ENVELOPES)
@settings(max_examples=40, deadline=None)
def test_the_fast_encoder_of_amqp_writes_the_same_headers_from_columns(envelope: Envelope) -> None:
    headers = amqp_binding.encoder(envelope.source)(
        str(envelope.id),
        envelope.type,
        envelope.version,
        envelope.tenant,
        envelope.operation,
        envelope.ordering_key,
        envelope.epoch,
        envelope.digest.raw,
        envelope.sequence,
        envelope.time.astimezone(timezone(timedelta(hours=5, minutes=30))),
        envelope.attributes,
        envelope.reference,
    )

    assert list(headers.items()) == list(amqp_binding.encode(envelope)[0].items())


def refused(headers: list[tuple[str, bytes | None]], key: bytes | None, value: bytes | None) -> tuple[str, str | None]:
    with pytest.raises(Undecodable) as caught:
        kafka_binding.decode(headers, key, value)
    return caught.value.reason, caught.value.field


def test_kafka_reads_strictly() -> None:
    envelope = an_envelope()
    key = key_of(envelope)
    good: list[tuple[str, bytes | None]] = [*kafka_binding.encode(envelope)]
    assert kafka_binding.decode(good, key, envelope.payload) == envelope

    assert refused([*good, ("ce_id", b"x")], key, b"{}") == ("duplicate_attribute", "id")
    assert refused([*good, ("Content-Type", b"x")], key, b"{}") == ("duplicate_attribute", "datacontenttype")
    assert refused([*good, ("ce_other", None)], key, b"{}") == ("invalid_attribute", "other")
    assert refused([*good, ("ce_other", b"\xff")], key, b"{}") == ("invalid_attribute", "other")
    assert refused([*good, ("ce_Jane Doe", b"x")], key, b"{}") == ("invalid_attribute", "*")
    assert kafka_binding.decode(good, b"report-7", envelope.payload) == envelope
    assert refused(good, b"report-8", b"{}") == ("wrong_key", "key")
    assert refused(good, b'["other","report-7"]', b"{}") == ("wrong_key", "key")
    twice = [*good, ("ce_datacontenttype", b"application/json")]
    assert kafka_binding.decode(twice, key, envelope.payload) == envelope
    assert refused([*good, ("ce_datacontenttype", b"text/plain")], key, b"{}") == (
        "invalid_attribute",
        "datacontenttype",
    )
    assert refused(good, key, b"") == ("empty_payload", "data")
    assert refused(good, key, None) == ("empty_payload", "data")
    assert refused([], key, b"{}") == ("missing_attribute", "datacontenttype")
    batch: list[tuple[str, bytes | None]] = [("content-type", b"application/cloudevents-batch+json")]
    assert refused(batch, key, b"{}") == ("structured_mode_unsupported", "datacontenttype")
    structured: list[tuple[str, bytes | None]] = [("content-type", b"application/cloudevents+json")]
    assert refused(structured, key, b"{}") == ("empty_payload", "data")
    assert refused([*structured, *structured], key, b"{}") == ("duplicate_attribute", "datacontenttype")
    for missing in range(len(good)):
        assert refused(good[:missing] + good[missing + 1 :], key, b"{}")[0] == "missing_attribute"


def test_kafka_leaves_other_headers_alone_and_accepts_a_missing_key() -> None:
    envelope = an_envelope()
    headers = [*kafka_binding.encode(envelope), ("traceparent", b"\xff"), ("traceparent", None), ("CE_ID", b"x")]

    assert kafka_binding.decode(headers, None, envelope.payload) == envelope


def test_amqp_reads_strictly() -> None:
    envelope = an_envelope()
    headers, content_type = amqp_binding.encode(envelope)
    broker = {"x-death": [{"count": 1}], "x-delivery-count": 3}
    assert amqp_binding.decode({**headers, **broker}, content_type, envelope.payload) == envelope
    as_bytes = {name: value.encode() for name, value in headers.items()}
    assert amqp_binding.decode(as_bytes, content_type, envelope.payload) == envelope

    extras: list[tuple[dict[str, object], str, str]] = [
        ({"ce_id": "x"}, "mixed_prefixes", "headers"),
        ({"cloudEvents:subject": "x"}, "mixed_prefixes", "headers"),
        ({"ce-other": 7}, "invalid_attribute", "other"),
        ({"ce-other": None}, "invalid_attribute", "other"),
        ({"ce-other": b"\xff"}, "invalid_attribute", "other"),
        ({"ce-id": "x"}, "invalid_attribute", "id"),
    ]
    for extra, reason, field in extras:
        with pytest.raises(Undecodable) as caught:
            amqp_binding.decode({**headers, **extra}, content_type, envelope.payload)
        assert (caught.value.reason, caught.value.field) == (reason, field)
    for bad_type, body, reason in [
        (None, b"{}", "missing_attribute"),
        ("application/cloudevents-batch+json", b"{}", "structured_mode_unsupported"),
        ("application/cloudevents+json", b"{}", "empty_payload"),
        (content_type, b"", "empty_payload"),
    ]:
        with pytest.raises(Undecodable) as caught:
            amqp_binding.decode(headers, bad_type, body)
        assert caught.value.reason == reason
    with pytest.raises(Undecodable):
        amqp_binding.decode(None, content_type, b"{}")


INTEROP = [
    an_envelope(),
    an_envelope(attributes={"subject": "é", "traceparent": "00-1", "dataschema": "https://example.org/s"}),
    an_envelope(reference="ref:s3://bucket/a"),
]


@pytest.mark.parametrize("envelope", INTEROP)
def test_the_sdk_reads_what_kafka_carries(envelope: Envelope) -> None:
    message = sdk_kafka.KafkaMessage(
        headers=dict(kafka_binding.encode(envelope)), key=key_of(envelope), value=envelope.payload
    )
    event = sdk_kafka.from_binary_event(message)

    seen = event.get_attributes()
    assert event.get_data() == {"a": 1}
    assert seen["time"] == envelope.time
    assert seen["datacontenttype"] == "application/json"
    for name, value in to_attributes(envelope).items():
        if name not in {"time", "partitionkey"}:
            assert seen[name] == value

    back = sdk_kafka.to_binary_event(event)
    assert back.headers.keys() == message.headers.keys()


@pytest.mark.parametrize("envelope", INTEROP)
def test_the_sdk_reads_what_amqp_carries_and_we_read_it_back(envelope: Envelope) -> None:
    headers, content_type = amqp_binding.encode(envelope)
    message = sdk_rabbitmq.RabbitMQMessage(headers=headers, content_type=content_type, body=envelope.payload)
    event = sdk_rabbitmq.from_binary_event(message)

    seen = event.get_attributes()
    assert event.get_data() == {"a": 1}
    assert {name: seen[name] for name in to_attributes(envelope) if name != "time"} == {
        name: value for name, value in to_attributes(envelope).items() if name != "time"
    }

    back = sdk_rabbitmq.to_binary_event(event)
    again = amqp_binding.decode(back.headers, back.content_type, back.body)
    assert dataclasses.replace(again, payload=envelope.payload) == envelope
    assert again.verify() == envelope.meaning
