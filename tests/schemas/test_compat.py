"""Within a version only members that default to None may be added; whatever else changes is told by the member's name."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, cast

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model

from fencepost.schemas import snapshots
from fencepost.schemas.compat import differences, same
from fencepost.schemas.content import JsonObject
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import Event, PrivateMark
from fencepost.schemas.snapshots import Revision, Snapshot
from fencepost.schemas.wire_schema import schema_of

TODAY = date(2026, 1, 31)


def event(**fields: Any) -> type[Event]:
    """An event of these fields that no registry knows: a type, or a type with its default."""
    given: dict[str, Any] = {
        name: field if isinstance(field, tuple) else (field, ...) for name, field in fields.items()
    }
    return create_model("Tested", __base__=Event, **given)


def model(name: str = "Line", *, closed: bool = False, **fields: Any) -> type[BaseModel]:
    given: dict[str, Any] = {key: field if isinstance(field, tuple) else (field, ...) for key, field in fields.items()}
    return create_model(name, __config__=ConfigDict(extra="forbid" if closed else "ignore"), **given)


def lines(**fields: Any) -> Any:
    """The type of a list of models with these fields."""
    return GenericAlias(list, (model(**fields),))


def nullable(one: type[BaseModel]) -> Any:
    return cast(Any, one) | None


def between(old: type[Event], new: type[Event]) -> list[tuple[str, str]]:
    return [(each.field, each.what) for each in differences(schema_of(old), schema_of(new))]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class More(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class Node(BaseModel):
    name: str
    inner: list[Node] = []


class GrownNode(BaseModel):
    name: str
    inner: list[GrownNode] = []
    note: str | None = None


class OtherNode(BaseModel):
    name: int
    inner: list[OtherNode] = []


BASE: dict[str, Any] = {
    "a": str,
    "n": (int, 3),
    "maybe": (str | None, None),
    "lines": (lines(price=Decimal), []),
    "hidden": (Annotated[str | None, PrivateMark()], None),
}


def test_the_schema_is_that_of_the_wire() -> None:
    schema = schema_of(
        event(
            a=str,
            at=datetime,
            price=Decimal,
            hidden=Annotated[str, PrivateMark()],
            note=(Annotated[str | None, PrivateMark()], None),
        )
    )

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["a", "at", "price", "_private"]
    properties: Any = schema["properties"]
    assert list(properties) == ["a", "at", "price", "_private"], "the envelope is not in it"
    assert properties["price"]["type"] == "string"
    assert properties["_private"]["required"] == ["hidden"]
    assert set(properties["_private"]["properties"]) == {"hidden", "note"}
    assert "additionalProperties" not in schema, "consumers ignore what they do not know"


COMPATIBLE: list[dict[str, Any]] = [
    {},
    {"b": (str | None, None)},
    {"b": (nullable(model("Other", x=int)), None)},
    {"also": (Annotated[int | None, PrivateMark()], None)},
    {"lines": (lines(price=Decimal, vat=(int | None, None)), [])},
    {"n": (int, 4)},
    {"a": Annotated[str, Field(title="Another", description="words", examples=["x"])]},
]


@pytest.mark.parametrize("added", COMPATIBLE)
def test_what_old_and_new_readers_both_understand_is_compatible(added: dict[str, Any]) -> None:
    assert between(event(**BASE), event(**{**BASE, **added})) == []


INCOMPATIBLE: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"a": None}, [("a", "was removed")]),
    ({"maybe": None}, [("maybe", "was removed")]),
    ({"hidden": None}, [("_private.hidden", "was removed")]),
    ({"a": None, "b": str}, [("a", "was removed (renamed to b?)"), ("b", "was added without the default None")]),
    ({"b": str}, [("b", "was added without the default None")]),
    ({"b": (str, "x")}, [("b", "was added without the default None")]),
    ({"b": (list[str], [])}, [("b", "was added without the default None")]),
    ({"also": (Annotated[str, PrivateMark()], "x")}, [("_private.also", "was added without the default None")]),
    ({"a": int}, [("a", "changed its type (type)")]),
    ({"a": datetime}, [("a", "changed its type (format)")]),
    ({"a": Annotated[str, Field(min_length=3)]}, [("a", "changed its type (minLength)")]),
    ({"a": list[str]}, [("a", "changed its type (items)"), ("a", "changed its type (type)")]),
    ({"a": (str | None, None)}, [("a", "changed its type (anyOf)"), ("a", "changed its type (type)"), ("a", "is no longer required")]),
    ({"n": int}, [("n", "became required")]),
    ({"lines": (lines(price=int), [])}, [("lines[].price", "changed its type (type)")]),
    ({"lines": (lines(price=Decimal, vat=int), [])}, [("lines[].vat", "was added without the default None")]),
    ({"lines": (lines(vat=int), [])}, [("lines[].price", "was removed"), ("lines[].vat", "was added without the default None")]),
    ({"hidden": None, "maybe": (Annotated[str | None, PrivateMark()], None)}, [("maybe", "was removed"), ("_private.hidden", "was removed (renamed to maybe?)")]),
    ({"hidden": (str | None, None)}, [("_private.hidden", "was removed")]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "found"), INCOMPATIBLE)
def test_what_either_side_would_misread_is_told_by_name(change: dict[str, Any], found: list[tuple[str, str]]) -> None:
    fields = {name: field for name, field in {**BASE, **change}.items() if field is not None}

    assert sorted(between(event(**BASE), event(**fields))) == sorted(found)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (Colour, More, "a"),
        (More, Colour, "a"),
        (Literal["x", "y"], Literal["x"], "a"),
        (dict[str, int], dict[str, str], "a[]"),
        (int | str, str | int | bool, "a"),
        (tuple[int, str], tuple[int, int], "a[]"),
        (Node, OtherNode, "a.name"),
        (model(closed=True, x=int), model(closed=True, x=int, y=(int | None, None)), "a.y"),
    ],
)
def test_types_within_types_are_compared(old: Any, new: Any, field: str) -> None:
    assert between(event(a=old), event(a=old)) == []  # the allowed control
    assert field in {found for found, _ in between(event(a=old), event(a=new))}


def test_a_recursive_model_is_compared_once_and_may_grow() -> None:
    assert between(event(a=Node), event(a=GrownNode)) == []


def test_words_make_no_revision_but_members_do() -> None:
    described = event(**{**BASE, "a": Annotated[str, Field(description="words")]})
    assert same(schema_of(event(**BASE)), schema_of(described))
    assert not same(schema_of(event(**BASE)), schema_of(event(**BASE, b=(int | None, None))))
    titled = event(**BASE, title=(str | None, None))
    assert not same(schema_of(event(**BASE)), schema_of(titled)), "a member called title is no title"


class Kept(Event, type="compat.kept", version=1):
    a: str
    b: int | None = None


def snapshot(*revisions: tuple[date, type[Event]]) -> dict[str, Snapshot]:
    made = tuple(Revision(day, schema_of(cls)) for day, cls in revisions)
    return {"compat.kept.v1": Snapshot("compat.kept", 1, made)}


def test_every_revision_inside_the_window_is_compared() -> None:
    """FULL_TRANSITIVE: compatible with the last revision is not enough while events of an older one are around."""
    first, later = event(a=str, gone=(str | None, None)), event(a=str)
    recorded = snapshot((TODAY - timedelta(days=90), first), (TODAY - timedelta(days=30), later))
    assert between(later, Kept) == []

    for window, fields in [(None, ["gone"]), (timedelta(days=30), ["gone"]), (timedelta(days=29), [])]:
        verdict = snapshots.compare([Kept], recorded, window=window, today=TODAY)
        assert [each.field for each in verdict.broken] == fields, window
        assert verdict.compared == (2 if fields else 1)


def test_a_recorded_version_must_stay_declared_and_a_new_one_may_come() -> None:
    recorded = snapshot((TODAY, Kept))
    assert snapshots.compare([Kept], recorded, window=None, today=TODAY).broken == ()  # the allowed control

    verdict = snapshots.compare([], recorded, window=None, today=TODAY)
    assert [(b.event, b.what) for b in verdict.broken] == [("compat.kept.v1", "is recorded but no longer declared")]


def test_what_is_recorded_is_read_back_and_revisions_only_grow(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "schemas"
    verdict = snapshots.compare([Kept], snapshots.load(folder), window=None, today=TODAY)
    assert verdict.unrecorded == ("compat.kept.v1",)
    (path,) = snapshots.record(folder, {}, verdict, TODAY)
    assert (path.name, list(folder.iterdir())) == ("compat.kept.v1.json", [path])
    before = snapshots.load(folder)
    assert before["compat.kept.v1"].revisions == (Revision(TODAY, schema_of(Kept)),)
    assert snapshots.compare([Kept], before, window=None, today=TODAY).unrecorded == ()

    grown = schema_of(event(a=str))
    older = {"compat.kept.v1": Snapshot("compat.kept", 1, (Revision(TODAY, grown),))}
    verdict = snapshots.compare([Kept], older, window=None, today=TODAY)
    assert (verdict.broken, verdict.unrecorded) == ((), ("compat.kept.v1",))
    snapshots.record(folder, older, verdict, TODAY)
    assert [r.schema for r in snapshots.load(folder)["compat.kept.v1"].revisions] == [grown, schema_of(Kept)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"type": "compat.kept", "version": 1, "revisions": []}',
        '{"type": "compat.kept", "version": 1, "revisions": [{"recorded": "yesterday", "schema": {}}]}',
        '{"type": "compat.kept", "version": 1, "revisions": [{"recorded": "2026-01-01", "schema": 7}]}',
        '{"type": "compat.other", "version": 1, "revisions": [{"recorded": "2026-01-01", "schema": {}}]}',
        '{"type": "compat.kept", "version": 1, "revisions": [{"recorded": "2026-01-02", "schema": {}}, '
        + '{"recorded": "2026-01-01", "schema": {}}]}',
    ],
)
def test_a_damaged_snapshot_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "compat.kept.v1.json"
    good: JsonObject = {"type": "compat.kept", "version": 1, "revisions": [{"recorded": "2026-01-01", "schema": {}}]}
    path.write_text(json.dumps(good))
    assert list(snapshots.load(tmp_path)) == ["compat.kept.v1"]  # the allowed control

    path.write_text(text)
    with pytest.raises(ConfigError, match="compat.kept.v1.json"):
        snapshots.load(tmp_path)


def test_a_member_that_defaults_to_none_changes_nothing_on_the_wire_until_it_is_used() -> None:
    """Why None is the rule: a retried operation has the same content before and after the upgrade."""

    class Before(Event, type="compat.rolling", version=1):
        a: str

    class After(Event, type="compat.rolled", version=1):
        a: str
        b: int | None = None

    before, after = Before(tenant="t", operation="o", a="x"), After(tenant="t", operation="o", a="x")
    assert before.payload() == after.payload()
    assert differences(schema_of(Before), schema_of(After)) == []
