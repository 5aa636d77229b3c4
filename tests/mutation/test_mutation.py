"""The harness itself: it finds every predicate, and what it lists as equivalent is still there."""

from __future__ import annotations

import pytest

from mutation.areas import AREAS, TESTS, guards
from mutation.equivalent import EQUIVALENT
from mutation.predicates import Mutant, conditions, functions, mutants

SAMPLE = """
CREATE OR REPLACE FUNCTION fencepost.look(p_key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_row record;
BEGIN
    PERFORM fencepost._enter();
    SELECT r.* INTO v_row FROM fencepost.r AS r WHERE r.key = p_key AND (r.a IS DISTINCT FROM 1 OR r.b BETWEEN 2 AND 3) FOR UPDATE;
    IF NOT FOUND THEN -- Not AND this
        PERFORM fencepost._refuse('ZF003', 'none AND nothing', 'key', NULL);
    ELSIF (v_row.a, v_row.b) IS DISTINCT FROM (1, 2) THEN
        RETURN CASE v_row.c WHEN 'x' THEN 'y' END;
    END IF;
    RETURN v_row.c IN ('d', 'e') AND greatest(v_row.a, 4) > 3;
END $$;
"""
EXPECTED = {
    "r.key = p_key -> true", "(r.a IS DISTINCT FROM 1 OR r.b BETWEEN 2 AND 3) -> true", "r.a IS DISTINCT FROM 1 -> false",
    "r.b BETWEEN 2 AND 3 -> false", "r.b BETWEEN 2 AND 3 without its end", "r.b BETWEEN 2 AND 3 without its beginning",
    "no FOR UPDATE", "no PERFORM fencepost._enter()", "IF NOT FOUND -> false", "IF NOT FOUND -> true",
    "ELSIF (v_row.a, v_row.b) IS DISTINCT FROM (1, 2) -> false", "ELSIF (v_row.a, v_row.b) IS DISTINCT FROM (1, 2) -> true",
    "row comparison without v_row.a", "row comparison without v_row.b", "WHEN 'x' never", "c IN ('d', 'e') without 'd'",
    "c IN ('d', 'e') without 'e'", "v_row.c IN ('d', 'e') -> true", "greatest(v_row.a, 4) > 3 -> true",
    "greatest(v_row.a, 4) -> v_row.a", "greatest(v_row.a, 4) -> 4", "refuses everything", "does nothing",
}  # fmt: skip


def _made(area: str) -> list[Mutant]:
    return [mutant for function in guards(AREAS[area]) for mutant in mutants(function)]


def test_every_predicate_lock_and_check_of_a_function_is_removed() -> None:
    (look,) = functions("sample.sql", SAMPLE)
    found = mutants(look)
    assert {mutant.key.removeprefix("look: ") for mutant in found} == EXPECTED and len(found) == len(EXPECTED)
    texts = {mutant.key.removeprefix("look: "): mutant.apply for mutant in found}
    assert "WHERE true AND (r.a" in texts["r.key = p_key -> true"]
    assert "OR r.b <= 3)" in texts["r.b BETWEEN 2 AND 3 without its beginning"]
    assert "ELSIF ROW(v_row.b) IS DISTINCT FROM ROW(2) THEN" in texts["row comparison without v_row.a"]
    assert "OR r.b BETWEEN 2 AND 3) ;" in texts["no FOR UPDATE"]
    assert "CASE v_row.c WHEN NULL THEN" in texts["WHEN 'x' never"]
    assert conditions("(new.a < old.a) OR new.b") == [
        ("(new.a < old.a) -> false", "false OR new.b"),
        ("new.b -> false", "(new.a < old.a) OR false"),
    ]


@pytest.mark.parametrize("area", AREAS)
def test_every_guarding_function_is_there_and_each_mutant_has_a_name_of_its_own(area: str) -> None:
    made = _made(area)
    assert len({mutant.key for mutant in made}) == len(made) > {"jobs": 900, "inbox": 200}.get(area, 50)
    assert all(mutant.apply != mutant.undo for mutant in made)
    assert all((TESTS / path).is_file() for near in AREAS[area].first.values() for path in near)
    assert all((TESTS / path).is_file() for path in AREAS[area].tests)


def test_what_is_listed_as_equivalent_is_still_a_mutant_and_says_why() -> None:
    made = {mutant.key for area in AREAS for mutant in _made(area)}
    functions_of = {mutant.function for area in AREAS for mutant in _made(area)}
    gone = [key for key in EQUIVALENT if key.split(":")[0] in functions_of and key not in made]
    assert gone == []
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())
