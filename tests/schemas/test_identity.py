"""What identifies something is compared as it is, and what could not travel is refused where it enters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import (
    as_class,
    as_consumer,
    as_effect_key,
    as_operation,
    as_ordering_key,
    as_source,
    as_tenant,
    as_type,
    as_version,
    uuid7,
)

Check = Callable[[Any], object]
IDENTITIES: dict[str, Check] = {
    "tenant": as_tenant,
    "operation": as_operation,
    "ordering_key": as_ordering_key,
    "effect_key": as_effect_key,
}


@pytest.mark.parametrize("field", IDENTITIES)
@pytest.mark.parametrize("value", ["a", "Straße 7", "A" * 200, "e\u0301", "\u00e9", "\U0001f600", "a b", "' OR 1=1 --"])
def test_an_identity_is_kept_as_it_is(field: str, value: str) -> None:
    assert IDENTITIES[field](value) == value


@pytest.mark.parametrize("field", IDENTITIES)
@pytest.mark.parametrize(
    "value",
    ["", "A" * 201, " a", "a ", "a\u00a0", "\u3000a", "a\nb", "a\x00b", "a\x7fb", "a\x85b", "\ud800", "\ufffe"]
    + ["\U0010ffff", 7, None, b"a"],
)
def test_an_identity_that_could_not_travel_is_refused_by_name(field: str, value: object) -> None:
    assert IDENTITIES[field]("a") == "a"

    with pytest.raises(InvalidInput) as caught:
        IDENTITIES[field](value)
    assert caught.value.field == field


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp", "Cn"]), min_size=1, max_size=200)
)
@settings(max_examples=100, deadline=None)
def test_any_ordinary_text_is_an_identity(value: str) -> None:
    assert as_tenant(value) == value
    value.encode()


@pytest.mark.parametrize("value", ["report", "report.accepted", "a1.b_2.c", "v1", "report.version1", "a" * 120])
def test_a_type_is_dotted_words(value: str) -> None:
    assert as_type(value) == value
    assert as_class(value) == value
    assert as_consumer(value) == value


@pytest.mark.parametrize(
    "value",
    ["Report", "report.", ".report", "a..b", "1a", "a.1b", "a b", "a\n", "a-b", "é", "a" * 121, "report.v1", "a.v99"],
)
def test_a_type_that_is_not_dotted_words_or_ends_in_a_version_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        as_type(value)
    assert caught.value.field == "type"


def test_a_consumer_may_contain_hyphens() -> None:
    assert as_consumer("report-analysis") == "report-analysis"
    with pytest.raises(InvalidInput):
        as_consumer("-report")


def test_a_version_is_a_small_positive_whole_number() -> None:
    assert [as_version(1), as_version(32767)] == [1, 32767]
    bad: list[Any] = [0, -1, 32768, True, 1.0, "1", None]
    for value in bad:
        with pytest.raises(InvalidInput) as caught:
            as_version(value)
        assert caught.value.field == "version"


def test_a_source_is_a_uri_reference() -> None:
    for value in ("urn:fencepost:reports", "/reports", "https://example.org/a?b=c#d", "%41"):
        assert as_source(value) == value
    for value in ("", "a b", "é", "%4", "a\n", "<a>"):
        with pytest.raises(InvalidInput):
            as_source(value)


def test_uuid7_has_version_variant_and_the_time() -> None:
    before = time.time_ns() // 1_000_000
    made = [uuid7() for _ in range(1000)]
    after = time.time_ns() // 1_000_000

    assert len(set(made)) == 1000
    for each in made:
        assert each.version == 7
        assert each.variant == "specified in RFC 4122"
        assert before - 1 <= each.int >> 80 <= after + 1
