"""Code and database of different versions: together inside the window, refused beyond it before anything is done."""

import pytest

from fencepost.schemas import contract, migrate
from fencepost.schemas.connect import connect as plain
from fencepost.schemas.errors import ContractMismatch
from support.catalog import describe
from support.contracts import declare
from support.database import Database


def test_the_number_is_the_same_in_code_and_database_and_the_window_ends_with_it(database: Database) -> None:
    with plain(database.dsn, autocommit=True) as conn:
        found = contract.read(conn)

    assert found is not None and found.version == contract.CONTRACT
    assert 1 <= found.serves <= contract.CONTRACT and 1 <= contract.OLDEST <= contract.CONTRACT


def test_a_newer_database_is_used_for_as_long_as_it_serves_this_code(database18: Database) -> None:
    declare(database18, contract.CONTRACT + 8, contract.CONTRACT)
    with contract.connect(database18.dsn) as conn:
        assert not conn.autocommit and conn.execute("SELECT 1").fetchone() == (1,)

    declare(database18, contract.CONTRACT + 8, contract.CONTRACT + 1)
    with pytest.raises(ContractMismatch, match="upgrade this program") as caught:
        contract.connect(database18.dsn)
    assert caught.value.field == "program"


def test_an_older_database_is_used_for_as_long_as_this_code_works_with_it(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "CONTRACT", contract.CONTRACT + 1)
    with contract.connect(database18.dsn) as conn:
        contract.require(conn)

    monkeypatch.setattr(contract, "OLDEST", contract.CONTRACT)
    with pytest.raises(ContractMismatch, match="run `fencepost migrate`") as caught:
        contract.connect(database18.dsn)
    assert caught.value.field == "database"


def test_a_database_that_declares_nothing_is_too_old(empty_database: Database) -> None:
    with pytest.raises(ContractMismatch, match="run `fencepost migrate`"):
        contract.connect(empty_database.dsn)
    migrate.apply(empty_database.dsn, state=empty_database.state)
    contract.connect(empty_database.dsn).close()  # the control

    with plain(empty_database.dsn) as conn:
        conn.execute("DROP FUNCTION fencepost.contract()")
    with pytest.raises(ContractMismatch) as caught:
        contract.connect(empty_database.dsn)
    assert caught.value.field == "database"


@pytest.mark.parametrize("newer", ["contract", "table"])
def test_an_older_program_takes_no_newer_function_back(database18: Database, newer: str) -> None:
    migrate.apply(database18.dsn, state=database18.state)  # the control
    if newer == "contract":
        declare(database18, contract.CONTRACT + 1, contract.CONTRACT)
    with plain(database18.dsn) as conn:
        if newer == "table":
            conn.execute("INSERT INTO fencepost.migration (name, checksum) VALUES ('9001_next.sql', 'x')")
        conn.execute(
            "CREATE OR REPLACE FUNCTION fencepost.armed() RETURNS boolean LANGUAGE sql AS 'SELECT true -- next'"
        )
        before = describe(conn)

    with pytest.raises(ContractMismatch, match="newer version has migrated") as caught:
        migrate.apply(database18.dsn, state=database18.state)

    assert caught.value.field == "program"
    with plain(database18.dsn) as conn:
        assert describe(conn) == before


def test_an_older_form_of_a_function_beside_the_newer_one_is_granted_as_well(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = b"CREATE OR REPLACE FUNCTION fencepost.armed(p_more text) RETURNS boolean LANGUAGE sql AS 'SELECT true'"
    real = migrate.functions()
    monkeypatch.setattr(migrate, "functions", lambda: [*real, migrate.Migration("zz/armed.sql", older)])
    migrate.apply(empty_database.dsn, state=empty_database.state, single_role=False, install="forms")
    forms = "SELECT has_function_privilege('fencepost_forms_relay', f::regprocedure, 'EXECUTE') FROM unnest(%(of)s::text[]) AS f"
    with plain(empty_database.dsn, autocommit=True) as conn:
        try:
            found = conn.execute(forms, {"of": ["fencepost.armed()", "fencepost.armed(text)"]}).fetchall()
        finally:
            conn.execute("DROP SCHEMA fencepost CASCADE")
            for (name,) in conn.execute(
                "SELECT rolname FROM pg_roles WHERE rolname LIKE 'fencepost\\_forms\\_%'"
            ).fetchall():
                conn.execute(f'DROP OWNED BY "{name}"'.encode())
                conn.execute(f'DROP ROLE "{name}"'.encode())
    assert found == [(True,), (True,)]
