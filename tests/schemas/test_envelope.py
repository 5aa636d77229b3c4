"""An envelope is verified against its own content, and attributes that could not travel are refused by name."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from fencepost.schemas.content import binding, reference_binding
from fencepost.schemas.digest import digest, meaning
from fencepost.schemas.envelope import (
    Envelope,
    from_attributes,
    instant,
    to_attributes,
    validate_attributes,
    validate_size,
)
from fencepost.schemas.errors import InvalidInput, Undecodable
from support.envelopes import an_envelope

JSON = "application/json"


def changed(name: str, value: str | None) -> dict[str, str]:
    attributes = to_attributes(an_envelope())
    if value is None:
        del attributes[name]
    else:
        attributes[name] = value
    return attributes


def test_the_attributes_are_cloudevents_and_all_strings() -> None:
    one = an_envelope(attributes={"subject": "s"})

    assert to_attributes(one) == {
        "specversion": "1.0",
        "id": "018f2d6e-7b00-7000-8000-000000000001",
        "source": "urn:fencepost:test",
        "type": "report.accepted.v2",
        "time": "2024-02-29T10:00:00.000005Z",
        "partitionkey": "report-7",
        "sequence": "09223372036854775807",
        "fptenant": "ténant",
        "fpoperation": "op-1",
        "fpepoch": "9007199254740993",
        "fpdigest": one.digest.text,
        "subject": "s",
    }


@pytest.mark.parametrize(
    "envelope",
    [
        an_envelope(),
        an_envelope(attributes={"subject": "s", "traceparent": "00-x"}),
        an_envelope(reference=reference_binding("s3://bucket/a@7")),
        an_envelope(sequence=0, epoch=0),
    ],
)
def test_attributes_give_the_envelope_back(envelope: Envelope) -> None:
    assert from_attributes(to_attributes(envelope), JSON, envelope.payload) == envelope
    assert pickle.loads(pickle.dumps(envelope)) == envelope


def test_verify_recomputes_all_three() -> None:
    one = an_envelope()

    assert one.verify() == one.meaning == meaning("ténant", "op-1", "report.accepted", 2, binding(one.payload))
    assert one.digest == digest("ténant", "op-1", "report.accepted", 2, one.epoch, binding(one.payload))
    assert dataclasses.replace(one, payload=b'{"a" : 1, "_private": {"x":2}}').verify() == one.meaning


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "other"},
        {"operation": "other"},
        {"type": "report.refused"},
        {"version": 3},
        {"epoch": 8},
        {"payload": b'{"a":2}'},
        {"reference": "ref:x"},
    ],
)
def test_a_changed_part_is_a_digest_mismatch(change: dict[str, Any]) -> None:
    one = an_envelope()
    one.verify()

    with pytest.raises(Undecodable) as caught:
        dataclasses.replace(one, **change).verify()
    assert caught.value.reason == "digest_mismatch"


def test_delivery_details_are_not_in_the_digest() -> None:
    one = an_envelope()

    dataclasses.replace(one, sequence=1, time=datetime.now(UTC), attributes={"subject": "x"}, ordering_key="k").verify()


def test_repr_shows_no_payload_and_no_attributes() -> None:
    text = repr(an_envelope(payload=b'{"a":"hunter2"}', attributes={"subject": "hunter3"}))

    assert "report.accepted" in text
    assert "hunter" not in text


@pytest.mark.parametrize(
    "name",
    ["specversion", "id", "source", "type", "time", "partitionkey", "sequence"]
    + ["fptenant", "fpoperation", "fpepoch", "fpdigest"],
)
def test_each_attribute_is_required(name: str) -> None:
    from_attributes(to_attributes(an_envelope()), JSON, b"{}")

    with pytest.raises(Undecodable) as caught:
        from_attributes(changed(name, None), JSON, b"{}")
    assert (caught.value.reason, caught.value.field) == ("missing_attribute", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "not-a-uuid"),
        ("id", "018F2D6E-7B00-7000-8000-000000000001"),
        ("id", "{018f2d6e-7b00-7000-8000-000000000001}"),
        ("source", "a b"),
        ("type", "report.accepted"),
        ("type", "report.accepted.v0"),
        ("type", "report.accepted.v02"),
        ("type", "report.accepted.v99999"),
        ("type", "Report.v1"),
        ("type", "a.v1.v1"),
        ("time", "2024-02-30T00:00:00Z"),
        ("time", "2024-02-29"),
        ("time", "2024-02-29T10:00:00"),
        ("time", "2024-02-29T10:00:00Z\n"),
        ("time", "0001-01-01T00:00:00+02:00"),
        ("partitionkey", ""),
        ("partitionkey", "a\nb"),
        ("sequence", "1"),
        ("sequence", "99999999999999999999"),
        ("sequence", "0000000000000000000\u0661"),
        ("fptenant", "\x00"),
        ("fptenant", "x" * 201),
        ("fpoperation", " x"),
        ("fpepoch", "-1"),
        ("fpepoch", "07"),
        ("fpepoch", "9223372036854775808"),
        ("fpdigest", "sha256:abc"),
        ("fpbinding", "jcs-sha256:" + "0" * 64),
        ("fpbinding", "ref:"),
        ("data", "x"),
        ("datacontenttype", "application/json"),
        ("Upper", "x"),
        ("a-b", "x"),
        ("other", "a\x00b"),
        ("other", "x" * 2049),
    ],
)
def test_an_attribute_out_of_form_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Undecodable) as caught:
        from_attributes(changed(name, value), JSON, b"{}")
    assert (caught.value.reason, caught.value.field) == ("invalid_attribute", name)


@pytest.mark.parametrize(
    ("specversion", "content_type", "payload", "reason"),
    [
        ("0.3", JSON, b"{}", "unsupported_specversion"),
        ("1.0", None, b"{}", "missing_attribute"),
        ("1.0", "text/plain", b"{}", "unsupported_content_type"),
        ("1.0", "Application/CloudEvents+json; charset=utf-8", b"{}", "structured_mode_unsupported"),
        ("1.0", "application/cloudevents-batch+json", b"{}", "structured_mode_unsupported"),
        ("1.0", JSON, b"", "empty_payload"),
        ("1.0", JSON, None, "empty_payload"),
    ],
)
def test_other_modes_and_contents_are_refused(
    specversion: str, content_type: str | None, payload: bytes | None, reason: str
) -> None:
    from_attributes(changed("specversion", "1.0"), "application/json; charset=utf-8", b"{}")

    with pytest.raises(Undecodable) as caught:
        from_attributes(changed("specversion", specversion), content_type, payload)
    assert caught.value.reason == reason


def test_attributes_of_others_are_kept() -> None:
    attributes = to_attributes(an_envelope()) | {"recordedtime": "x", "fpfuture": "y", "empty": "", "n" * 64: "z"}

    assert from_attributes(attributes, JSON, b"{}").attributes == {
        "recordedtime": "x",
        "fpfuture": "y",
        "empty": "",
        "n" * 64: "z",
    }
    with pytest.raises(Undecodable):
        from_attributes(attributes | {f"n{i}": "x" for i in range(64)}, JSON, b"{}")


def test_equal_instants_have_one_text() -> None:
    here = datetime(2024, 6, 1, 12, tzinfo=UTC)

    assert instant(here) == instant(here.astimezone(timezone(timedelta(hours=-5)))) == "2024-06-01T12:00:00.000000Z"
    with pytest.raises(InvalidInput):
        instant(datetime(2024, 6, 1, 12))


def test_a_producers_attributes_are_sorted_and_copied() -> None:
    given = {"traceparent": "00-1", "subject": "é", "dataschema": "https://example.org/s/1", "x1": "y" * 2048}

    assert list(validate_attributes(given)) == ["dataschema", "subject", "traceparent", "x1"]
    assert validate_attributes(given) == given
    assert validate_attributes({}) == {}


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        *[({name: "x"}, f"attributes.{name}") for name in ("id", "type", "data", "sequence", "fptenant", "fpx", "fp")],
        *[({name: "x"}, "attributes") for name in ("", "A", "a-b", "a_b", "abc\n", "é", "x" * 21)],
        ({"subject": "a\r\nb"}, "attributes.subject"),
        ({"subject": "a\x00"}, "attributes.subject"),
        ({"subject": "\ud800"}, "attributes.subject"),
        ({"subject": "\ufdd0"}, "attributes.subject"),
        ({"subject": "\x9f"}, "attributes.subject"),
        ({"subject": ""}, "attributes.subject"),
        ({"subject": 7}, "attributes.subject"),
        ({"subject": True}, "attributes.subject"),
        ({"subject": "é" * 1025}, "attributes.subject"),
        ({"dataschema": "not a uri"}, "attributes.dataschema"),
        ({f"a{i}": "x" for i in range(17)}, "attributes"),
    ],
)
def test_a_producers_wrong_attribute_is_refused_by_name(attributes: dict[str, Any], field: str) -> None:
    assert validate_attributes({"subject": "x"}) == {"subject": "x"}

    with pytest.raises(InvalidInput) as caught:
        validate_attributes(attributes)
    assert caught.value.field == field


def test_the_whole_event_has_a_limit() -> None:
    assert validate_size(b"12345", {"ab": "é"}, limit=9) == 9
    with pytest.raises(InvalidInput) as caught:
        validate_size(b"12345", {"ab": "é"}, limit=8)
    assert caught.value.field == "payload"
