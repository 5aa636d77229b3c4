"""A declared event has one payload, private members stay private, and what cannot be sent is refused by name."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from types import new_class
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, field_validator

from fencepost.schemas.content import binding
from fencepost.schemas.errors import ConfigError, InvalidInput, Undecodable
from fencepost.schemas.event import Event, Private, registry

ARRIVAL_ID = UUID(int=7)


class Colour(Enum):
    RED = "red"


class Line(BaseModel):
    price: Decimal
    at: datetime | None = None


class Plain(Event, type="test.plain", version=1):
    submission_id: str
    note: str | None = None


class Rich(Event, type="test.rich", version=3):
    when: datetime
    day: date
    money: Decimal
    ref: UUID
    colour: Colour
    lines: list[Line]
    pair: tuple[int, str]
    tags: set[str]
    labels: dict[str, int | None]
    blob: bytes


class Person(Event, type="test.person", version=1):
    number: int
    name: Private[str]
    phone: Private[str] | None = None
    born: Annotated[Private[date] | None, Field(description="x")] = None


class Loose(Event, type="test.loose", version=1):
    value: Any = None


@dataclass
class Arrived:
    type: str
    version: int
    payload: bytes
    tenant: str = "t"
    operation: str = "o"
    ordering_key: str = "k"
    id: UUID = ARRIVAL_ID


def arrived(event: Event, payload: bytes | None = None) -> Arrived:
    return Arrived(
        event.event_type,
        event.event_version,
        event.payload() if payload is None else payload,
        event.tenant,
        event.operation,
        event.ordering_key,
    )


def declare_class(
    name: str, annotations: dict[str, Any] | None = None, defaults: dict[str, Any] | None = None, **kwargs: Any
) -> type[Event]:
    def body(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = __name__
        namespace["__annotations__"] = annotations or {"a": int}
        namespace |= {key: value for key, value in (defaults or {}).items() if value is not ...}

    return new_class(name, (Event,), kwargs, body)


def rich() -> Rich:
    return Rich(
        tenant="t",
        operation="o",
        ordering_key="k",
        when=datetime(2024, 2, 29, 12, 0, tzinfo=timezone(timedelta(hours=2))),
        day=date(2024, 2, 29),
        money=Decimal("1.10"),
        ref=UUID(int=5),
        colour=Colour.RED,
        lines=[Line(price=Decimal(2), at=datetime(2024, 1, 1, 0, 0, 0, 5, tzinfo=UTC)), Line(price=Decimal(3))],
        pair=(1, "é"),
        tags={"b", "a"},
        labels={"x": None},
        blob=b"raw",
    )


def person() -> Person:
    return Person(tenant="t", operation="o", number=7, name="Jane Doe", phone="555-0199", born=date(1990, 1, 1))


def test_the_payload_is_the_content_without_the_envelope() -> None:
    event = Plain(tenant="t", operation="o", submission_id="s-1")

    assert event.payload() == b'{"submission_id":"s-1"}'
    assert (event.event_type, event.event_version) == ("test.plain", 1)


def test_the_ordering_key_is_the_operation_unless_given() -> None:
    assert Plain(tenant="t", operation="o", submission_id="s").ordering_key == "o"
    assert Plain(tenant="t", operation="o", ordering_key="k", submission_id="s").ordering_key == "k"


def test_every_kind_of_value_has_one_form() -> None:
    assert json.loads(rich().payload()) == {
        "when": "2024-02-29T10:00:00Z",
        "day": "2024-02-29",
        "money": "1.10",
        "ref": "00000000-0000-0000-0000-000000000005",
        "colour": "red",
        "lines": [{"price": "2", "at": "2024-01-01T00:00:00.000005Z"}, {"price": "3"}],
        "pair": [1, "é"],
        "tags": ["a", "b"],
        "labels": {"x": None},
        "blob": "raw",
    }


@pytest.mark.parametrize("event", [Plain(tenant="t", operation="o", submission_id="s"), rich(), person()])
def test_a_consumer_reads_what_the_producer_declared(event: Event) -> None:
    again = type(event).parse(arrived(event))

    assert again == event
    assert again.payload() == event.payload()
    assert registry.parse(arrived(event)) == event


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30), st.integers(-9, 9)
)
@settings(max_examples=80, deadline=None)
def test_any_text_survives_the_way(text: str, number: int) -> None:
    event = Person(tenant="t", operation="o", number=number, name=text)

    assert Person.parse(arrived(event)) == event


def test_equal_instants_give_equal_payloads() -> None:
    class Timed(Event, type="test.timed", version=1):
        at: datetime

    here = datetime(2024, 6, 1, 12, tzinfo=UTC)
    there = here.astimezone(timezone(timedelta(hours=-5)))

    assert Timed(tenant="t", operation="o", at=here).payload() == Timed(tenant="t", operation="o", at=there).payload()


def test_private_members_stay_out_of_binding_and_repr() -> None:
    event = person()
    other = Person(tenant="t", operation="o", number=7, name="Someone Else")

    assert b"Jane Doe" in event.payload()
    assert binding(event.payload()) == binding(other.payload()) == binding(b'{"number":7}')
    for secret in ("Jane", "555-0199", "1990"):
        assert secret not in repr(event) + str(event)
    assert "number=7" in repr(event)


def test_a_private_member_outside_its_place_is_not_read() -> None:
    event = person()

    with pytest.raises(Undecodable) as caught:
        Person.parse(arrived(event, b'{"number":7,"name":"Jane Doe"}'))
    assert (caught.value.reason, caught.value.field) == ("invalid_content", "name")
    assert "Jane" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"submission_id": 5}, "submission_id"),
        ({}, "submission_id"),
        ({"submission_id": "s", "other": "Jane"}, "other"),
        ({"submission_id": "s", "tenant": ""}, "tenant"),
        ({"submission_id": "s", "tenant": "a\nb"}, "tenant"),
        ({"submission_id": "s", "operation": " o"}, "operation"),
        ({"submission_id": "s", "operation": 7}, "operation"),
        ({"submission_id": "s", "ordering_key": "\x00"}, "ordering_key"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert Plain(tenant="t", operation="o", submission_id="s").tenant == "t"

    with pytest.raises(InvalidInput) as caught:
        Plain(**{"tenant": "t", "operation": "o"} | fields)
    assert caught.value.field == field
    assert caught.value.__cause__ is None
    assert "Jane" not in str(caught.value)


def test_a_validator_that_quotes_the_value_does_not_leak_it() -> None:
    class Careless(Event, type="test.careless", version=1):
        word: str

        @field_validator("word")
        @classmethod
        def _short(cls, value: str) -> str:
            if len(value) > 3:
                raise ValueError(f"{value} is too long")
            return value

    assert Careless(tenant="t", operation="o", word="abc").word == "abc"
    with pytest.raises(InvalidInput) as caught:
        Careless(tenant="t", operation="o", word="secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(Undecodable) as arrived_at:
        Careless.parse(Arrived("test.careless", 1, b'{"word":"secret"}'))
    assert "secret" not in str(arrived_at.value)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (1.5, "value"),
        ({"a": [1, float("inf")]}, "value.a.1"),
        ({"a": [1, 2.0]}, "value.a.1"),
        ("a\0", "value"),
        ({"Jane Doe": "\ud800"}, "value.*"),
        (2**53, "value"),
        (Decimal("NaN"), "value"),
        (datetime(2024, 1, 1), "value"),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=2))), "value"),
        (SecretStr("hunter2"), "value"),
        (object(), "value"),
        (b"\xff", "value"),
        ({1.5: 1}, "value.*"),
        ({1: "a", "1": "b"}, "value"),
        ("x" * 1024 * 1024, "payload"),
    ],
)
def test_content_outside_the_profile_is_refused_with_the_field(value: Any, field: str) -> None:
    assert Loose(tenant="t", operation="o", value="plain").payload() == b'{"value":"plain"}'

    with pytest.raises(InvalidInput) as caught:
        Loose(tenant="t", operation="o", value=value).payload()
    assert caught.value.field == field


def test_unknown_members_are_ignored_by_consumers() -> None:
    event = Plain(tenant="t", operation="o", submission_id="s")
    payload = b'{"submission_id":"s","later":{"x":1},"tenant":"other","_private":{"name":"x"}}'

    assert Plain.parse(arrived(event, payload)) == event


@pytest.mark.parametrize(
    ("arrival", "reason", "field"),
    [
        (Arrived("test.other", 1, b"{}"), "unknown_type", "type"),
        (Arrived("test.plain", 2, b"{}"), "newer_version", "version"),
        (Arrived("test.plain", 1, b"{}"), "invalid_content", "submission_id"),
        (Arrived("test.plain", 1, b'{"submission_id":12345}'), "invalid_content", "submission_id"),
        (Arrived("test.plain", 1, b'{"submission_id":"s","_private":7}'), "invalid_content", "_private"),
        (Arrived("test.plain", 1, b'{"submission_id":1.5}'), "float", "/submission_id"),
        (Arrived("test.plain", 1, b"[]"), "not_an_object", None),
        (Arrived("test.plain", 1, b'{"submission_id":"s"}', tenant=""), "invalid_content", "tenant"),
    ],
)
def test_an_event_that_is_not_this_one_is_undecodable(arrival: Arrived, reason: str, field: str | None) -> None:
    assert Plain.parse(Arrived("test.plain", 1, b'{"submission_id":"s"}')).submission_id == "s"

    for parse in (Plain.parse, registry.parse):
        with pytest.raises(Undecodable) as caught:
            parse(arrival)
        assert (caught.value.reason, caught.value.field) == (reason, field)
        assert "12345" not in str(caught.value)


def test_events_are_immutable_and_strict() -> None:
    event = Plain(tenant="t", operation="o", submission_id="s")

    with pytest.raises(ValueError, match="frozen"):
        setattr(event, "submission_id", "other")  # noqa: B010


def test_one_class_per_type_and_version_but_a_re_import_is_welcome() -> None:
    def declare() -> type[Event]:
        class Again(Event, type="test.again", version=1):
            a: int

        return Again

    assert declare() is not declare()

    with pytest.raises(ConfigError) as caught:
        declare_class("Another", type="test.again", version=1)
    assert caught.value.field == "type"
    assert registry.versions("test.again") == (1,)


def test_a_class_needs_both_type_and_version_and_good_ones() -> None:
    assert declare_class("Fine", type="test.thing", version=2).event_version == 2

    with pytest.raises(ConfigError):
        declare_class("NoVersion", type="test.noversion")
    with pytest.raises(InvalidInput):
        declare_class("InName", type="test.thing.v2", version=2)
    with pytest.raises(InvalidInput):
        declare_class("Zero", type="test.zero", version=0)

    assert registry.versions("test.noversion") == registry.versions("test.zero") == ()


def test_a_base_class_shares_fields_but_is_no_event() -> None:
    class Base(Event):
        a: int

    class Child(Base, type="test.child", version=1):
        b: int

    assert Child(tenant="t", operation="o", a=1, b=2).payload() == b'{"a":1,"b":2}'
    with pytest.raises(ConfigError):
        Base(tenant="t", operation="o", a=1).payload()


def test_a_field_that_could_not_be_read_back_is_refused_at_declaration() -> None:
    class Inner(BaseModel):
        secret: Private[str]

    class Nullable(BaseModel):
        a: int | None

    def declare(annotation: Any, default: Any = ...) -> None:
        declare_class("Declared", {"a": annotation}, {"a": default}, type="test.declared", version=1)

    declare(int)
    declare(int | None, None)
    declare(Any, None)
    for annotation, default in [
        (int | None, ...),
        (int | None, 5),
        (Any, ...),
        (Annotated[int | None, "x"], ...),
        (Inner, ...),
        (list[Inner], ...),
        (dict[str, Nullable], ...),
        (int, Field(alias="b")),
        (int, Field(default=1, exclude=True)),
    ]:
        with pytest.raises(ConfigError) as caught:
            declare(annotation, default)
        assert caught.value.field == "a"


def test_names_of_the_envelope_and_of_event_are_taken() -> None:
    for name, annotation in [("tenant", Private[str]), ("operation", int), ("payload", str), ("event_type", str)]:
        declare_class("Named", {"free": annotation}, type="test.named", version=1)

        with pytest.raises(ConfigError) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # pydantic itself warns of a shadowed attribute
            declare_class("Named", {name: annotation}, type="test.named", version=1)
        assert caught.value.field == name
