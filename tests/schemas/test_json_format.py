"""Structured mode carries the same event with the same payload bytes, and whatever it cannot read has a typed reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fencepost.schemas import amqp_binding, content, json_format, kafka_binding
from fencepost.schemas.envelope import Envelope, to_attributes
from fencepost.schemas.errors import Undecodable
from support.envelopes import an_envelope

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-content.INTEGER_MAX, content.INTEGER_MAX) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=15,
)
VISIBLE = st.text(alphabet=st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)


def payloads() -> st.SearchStrategy[bytes]:
    """Texts of one object as different writers write them: spaced, escaped, with a private member, surrounded by space."""

    def written(value: dict[str, Any], ascii: bool, indent: int | None, around: bytes) -> bytes:
        return around + json.dumps(value, ensure_ascii=ascii, indent=indent).encode() + around

    objects = st.dictionaries(TEXT | st.just("_private"), VALUE, max_size=5)
    return st.builds(written, objects, st.booleans(), st.none() | st.just(2), st.sampled_from([b"", b" ", b"\r\n"]))


ENVELOPES = st.builds(
    an_envelope,
    payload=payloads(),
    tenant=VISIBLE,
    operation=VISIBLE,
    ordering_key=VISIBLE,
    epoch=st.integers(0, 2**63 - 1),
    attributes=st.dictionaries(st.from_regex(r"x[a-z0-9]{0,9}", fullmatch=True), VISIBLE, max_size=3),
    reference=st.none() | VISIBLE.map(lambda text: f"ref:{text}"),
)


def document(**changes: Any) -> dict[str, Any]:
    """The members of a good document; None takes one out."""
    good: dict[str, Any] = {**to_attributes(an_envelope()), "datacontenttype": "application/json", "data": {"a": 1}}
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def refused(raw: bytes, content_type: str = CONTENT_TYPE) -> tuple[str, str | None]:
    with pytest.raises(Undecodable) as caught:
        json_format.decode(raw, content_type)
    return caught.value.reason, caught.value.field


@given(ENVELOPES)
@settings(max_examples=120, deadline=None)
def test_both_brokers_give_every_envelope_back_with_the_payload_bytes_that_went_in(envelope: Envelope) -> None:
    headers, value = kafka_binding.encode_structured(envelope)
    body, content_type = amqp_binding.encode_structured(envelope)
    key = kafka_binding.key(envelope.tenant, envelope.ordering_key)

    for again in (kafka_binding.decode(headers, key, value), amqp_binding.decode({}, content_type, body)):
        assert again == envelope
        assert again.payload == envelope.payload
        assert again.body == value
        assert again.verify() == envelope.meaning
        assert json_format.encode(again) == value == body


@given(ENVELOPES, st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_document_written_anew_by_others_keeps_binding_and_digest(envelope: Envelope, ascii: bool) -> None:
    read: dict[str, Any] = json.loads(json_format.encode(envelope))
    anew = json.dumps(dict(reversed(read.items())), ensure_ascii=ascii, indent=1).encode()

    again = json_format.decode(anew, "Application/CloudEvents+JSON")

    assert again.verify() == envelope.meaning
    assert replace(again, payload=envelope.payload) == envelope


@pytest.mark.parametrize(
    "payload",
    [
        b'{},"id":"another"',
        b'{"a":1},"data_base64":"e30="',
        b'{"a":1}}',
        b"[1]",
        b"nonsense",
        b"\xff",
        b'{"a":1,"a":2}',
        b'{"a":1e999}',
        b'{"a":NaN}',
        b'{"a":"\\ud800"}',
        b' {"a":1}',
        b'{"a":1}\n',
        b'{"a":' * 70 + b"1" + b"}" * 70,
    ],
)
def test_a_payload_that_could_not_stand_there_as_it_is_travels_in_base64(payload: bytes) -> None:
    plain = an_envelope(reference="ref:a")
    assert b'"data":{"a":1}' in json_format.encode(plain)  # the allowed control

    raw = json_format.encode(replace(plain, payload=payload))

    assert json.loads(raw)["data_base64"] == base64.b64encode(payload).decode()
    assert json_format.decode(raw, CONTENT_TYPE) == replace(plain, payload=payload)


def test_an_attribute_may_be_a_boolean_or_an_integer_and_null_is_absence() -> None:
    written = document(fpepoch=7, xflag=True, xother=False, xnumber=-(2**31))
    raw = json.dumps({**written, "subject": None, "data_base64": None, "xgone": None}).encode()

    found = json_format.decode(raw, CONTENT_TYPE)

    assert found.epoch == 7
    assert found.attributes == {"xflag": "true", "xother": "false", "xnumber": "-2147483648"}


def test_content_type_of_the_data_may_be_absent_but_not_another() -> None:
    absent = json.dumps(document(datacontenttype=None)).encode()
    assert json_format.decode(absent, CONTENT_TYPE).verify()
    other = json.dumps(document(datacontenttype="text/plain")).encode()
    assert refused(other) == ("unsupported_content_type", "datacontenttype")


@pytest.mark.parametrize("name", sorted(to_attributes(an_envelope())))
def test_every_attribute_is_required_by_name(name: str) -> None:
    assert json_format.decode(json.dumps(document()).encode(), CONTENT_TYPE).verify()  # the allowed control
    assert refused(json.dumps(document(**{name: None})).encode()) == ("missing_attribute", name)
    assert refused(json.dumps(document(**{name: {}})).encode()) == ("invalid_attribute", name)


GOOD = json.dumps(document()).encode()


@pytest.mark.parametrize(
    ("raw", "reason", "field"),
    [
        (b"", "empty_payload", "data"),
        (b"[]", "not_an_object", None),
        (b"{", "malformed_json", None),
        (b"\xef\xbb\xbf" + GOOD, "byte_order_mark", None),
        (GOOD.decode().encode("utf-16"), "not_utf8", None),
        (GOOD + b"{}", "malformed_json", None),
        (GOOD[:-1] + b',"x":"\\ud800"}', "lone_surrogate", None),
        (GOOD[:-1] + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}", "too_deep", None),
        (GOOD[:-1] + b',"x":' + b"[" * 100 + b"]" * 100 + b"}", "invalid_attribute", "x"),
        (GOOD[:-1] + b',"x":1' + b"0" * 5000 + b"}", "integer_range", None),
        (GOOD[:-1] + b',"x":' + b'"' + b"x" * 3_200_000 + b'"}', "too_large", None),
        (GOOD[:-1] + b',"id":"x"}', "duplicate_attribute", "id"),
        (GOOD[:-1] + b',"\\u0069d":"x"}', "duplicate_attribute", "id"),
        (GOOD[:-1] + b',"data":{}}', "duplicate_attribute", "data"),
        (GOOD[:-1] + b',"data_base64":"e30="}', "duplicate_attribute", "data_base64"),
        (GOOD[:-1] + b',"x":NaN}', "invalid_attribute", "x"),
        (GOOD[:-1] + b',"x":1.5}', "invalid_attribute", "x"),
        (GOOD[:-1] + b',"x":2147483648}', "invalid_attribute", "x"),
        (GOOD[:-1] + b',"x":"a\\r\\nb"}', "invalid_attribute", "x"),
        (GOOD[:-1] + b',"x":"\\u0000"}', "invalid_attribute", "x"),
        (GOOD[:-1] + b',"Jane Doe":"x"}', "invalid_attribute", "*"),
        (GOOD[:-1] + b',"":"x"}', "invalid_attribute", "*"),
    ],
)
def test_a_document_is_read_strictly(raw: bytes, reason: str, field: str | None) -> None:
    assert json_format.decode(GOOD, CONTENT_TYPE).verify()  # the allowed control
    assert refused(raw) == (reason, field)


def of_data(data: str) -> bytes:
    return json.dumps(document(data=None)).encode()[:-1] + b',"data":' + data.encode() + b"}"


@pytest.mark.parametrize(
    ("data", "reason", "field"),
    [
        ("null", "empty_payload", "data"),
        ('"{}"', "not_an_object", None),
        ("[1]", "not_an_object", None),
        ('{"a":1,"a":1}', "duplicate_key", "/a"),
        ('{"a":NaN}', "not_finite", "/a"),
        ('{"a":1e999}', "float", "/a"),
        ('{"a":9007199254740993}', "integer_range", "/a"),
        ('{"a":"\\u0000"}', "nul", "/a"),
        ('{"a":' * 65 + "1" + "}" * 65, "too_deep", None),
        ('{"b":1}', "digest_mismatch", "fpdigest"),
    ],
)
def test_data_is_as_strict_as_a_payload_of_its_own(data: str, reason: str, field: str | None) -> None:
    assert json_format.decode(of_data(' {"a": 1} '), CONTENT_TYPE).verify()  # the allowed control
    with pytest.raises(Undecodable) as caught:
        json_format.decode(of_data(data), CONTENT_TYPE).verify()
    assert caught.value.reason == reason
    assert field is None or caught.value.field == field


@pytest.mark.parametrize("value", ["e30", "e30=\n", "e3 0=", "%%%%", "é", 7, True, {}, ["e30="]])
def test_data_base64_is_strict(value: object) -> None:
    good = document(data=None, data_base64=base64.b64encode(b'{"a":1}').decode())
    assert json_format.decode(json.dumps(good).encode(), CONTENT_TYPE).verify()  # the allowed control
    assert refused(json.dumps({**good, "data_base64": value}).encode()) == ("invalid_attribute", "data_base64")
    assert refused(json.dumps({**good, "data_base64": ""}).encode()) == ("empty_payload", "data")


def test_only_utf8_is_read() -> None:
    for good in ("application/cloudevents+json", 'application/cloudevents+json;charset="UTF-8"'):
        assert json_format.decode(GOOD, good).verify()
    assert refused(GOOD, "application/cloudevents+json; charset=latin1") == (
        "unsupported_content_type",
        "datacontenttype",
    )


def test_headers_beside_a_document_are_not_believed() -> None:
    envelope = an_envelope()
    headers, value = kafka_binding.encode_structured(envelope)
    beside: list[tuple[str, bytes | None]] = [*headers, ("ce_id", b"x"), ("ce_id", None), ("ce_fptenant", b"other")]

    assert kafka_binding.decode(beside, None, value) == envelope
    assert amqp_binding.decode({"ce-id": "x", "ce_id": 7}, CONTENT_TYPE, value) == envelope
    with pytest.raises(Undecodable) as caught:
        kafka_binding.decode(headers, b"other", value)
    assert caught.value.reason == "wrong_key"


def readers() -> list[Callable[[bytes], object]]:
    return [
        lambda raw: json_format.decode(raw, CONTENT_TYPE).verify(),
        lambda raw: kafka_binding.decode([("content-type", CONTENT_TYPE)], None, raw).verify(),
    ]


TOKENS = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u", b"\\ud800", b"NaN", b"1e999", b"null", b'"data"', b"\xff", b"\0"]
)


@given(st.binary(max_size=60) | st.lists(TOKENS, max_size=30).map(b"".join), st.data())
@settings(max_examples=300, deadline=None)
@example(b"{" * 100_000, None)
def test_any_bytes_are_read_or_have_a_typed_reason(raw: bytes, data: Any) -> None:
    where = data.draw(st.integers(0, len(GOOD))) if data is not None else 0
    until = data.draw(st.integers(where, len(GOOD))) if data is not None else 0
    for text in (raw, GOOD[:where] + raw + GOOD[until:], of_data("").replace(b"}", raw + b"}")):
        for read in readers():
            try:
                read(text)
            except Undecodable as error:
                assert error.reason
