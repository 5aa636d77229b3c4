"""A label that nobody could reach is an error, not a gap in the matrix."""

from pathlib import Path

import pytest

from crash.points import points

PYTHON = """
def step():
    # Crash here: [A1] before the call,
    # and of two lines.
    call(
        1
    )
"""
SQL = """
CREATE FUNCTION fencepost.earlier() RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION fencepost.step(p integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- Crash here: [B] before the write.
    {write} fencepost.slot;
END $$;
"""


def found(
    folder: Path, python: str = PYTHON, sql: str = SQL.format(write="DELETE FROM")
) -> dict[str, tuple[object, ...]]:
    (folder / "a.py").write_text(python)
    (folder / "a.sql").write_text(sql)
    return {p.label: (p.line, p.function, p.event, p.table) for p in points(folder, folder).values()}


def test_a_label_is_found_with_the_statement_behind_it(tmp_path: Path) -> None:
    assert found(tmp_path) == {"A1": (5, "", "", ""), "B": (6, "fencepost.step", "DELETE", "fencepost.slot")}


@pytest.mark.parametrize(
    ("python", "sql"),
    [
        (PYTHON.replace("[A1] ", ""), ""),
        (PYTHON.replace("[A1]", "A1:"), ""),
        ('"""Crash here: [A1] in a docstring."""\n', ""),
        (PYTHON + PYTHON, ""),
        (PYTHON, SQL.format(write="DELETE FROM").replace("[B]", "[A1]")),
        (PYTHON, SQL.format(write="SELECT FROM")),
        (PYTHON, "-- Crash here: [B] outside of any function.\nDELETE FROM fencepost.slot;\n"),
    ],
)
def test_a_label_that_is_misspelt_doubled_or_out_of_reach_is_refused(python: str, sql: str, tmp_path: Path) -> None:
    found(tmp_path)  # the control
    with pytest.raises(ValueError):
        found(tmp_path, python, sql)
