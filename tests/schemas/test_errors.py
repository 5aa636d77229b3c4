"""Every refusal has one class, survives pickling, names its field, and keeps content to itself."""

from __future__ import annotations

import copy
import pickle

import psycopg
import pytest
from psycopg.pq import DiagnosticField

from fencepost.schemas import errors
from fencepost.schemas.errors import (
    Damaged,
    FencepostError,
    FromDatabase,
    InvalidInput,
    NotDispatched,
    Refused,
    StaleFence,
    Undecodable,
    Unreachable,
    Unresolved,
)
from support.database import Database

CODES = {
    "ZF001": "NotArmed",
    "ZF002": "WitnessMismatch",
    "ZF003": "InvalidInput",
    "ZF004": "WrongTransaction",
    "ZF010": "OperationConflict",
    "ZF020": "StaleFence",
    "ZF021": "EpochFrozen",
    "ZF022": "NotFenced",
    "ZF023": "ObjectGone",
    "ZF030": "EffectOpen",
    "ZF031": "EffectLimit",
    "ZF032": "FinishOnly",
    "ZF033": "StaleEffectAttempt",
    "ZF034": "NotQuiescent",
    "ZF035": "WrongVersion",
    "ZF036": "NotUnknown",
    "ZF037": "EvidenceMissing",
    "ZF040": "StaleSlot",
    "ZF041": "RoutesChanged",
    "ZF050": "UnknownJob",
    "ZF051": "UnknownClass",
    "ZF060": "SecondOwner",
    "ZF061": "Restricted",
}
GROUPS = (Refused, Unresolved, NotDispatched, Damaged)
CLASSES = [getattr(errors, name) for name in errors.__all__ if name not in {"Reason", "FencepostError", "FromDatabase"}]


def from_server(cls: type[FromDatabase]) -> FromDatabase:
    """As psycopg makes one, with a server that appends bound parameters to the context."""
    info: dict[int, bytes | None] = {
        DiagnosticField.SQLSTATE: (cls.sqlstate or "").encode(),
        DiagnosticField.MESSAGE_PRIMARY: b"no longer yours",
        DiagnosticField.MESSAGE_HINT: b"stop",
        DiagnosticField.COLUMN_NAME: b"generation",
        DiagnosticField.CONTEXT: b"unnamed portal with parameters: $1 = 'hunter2'",
        DiagnosticField.MESSAGE_DETAIL: b"hunter2",
    }
    return cls("no longer yours\nCONTEXT: unnamed portal with parameters: $1 = 'hunter2'", info=info)


@pytest.mark.parametrize(("code", "name"), CODES.items())
def test_psycopg_raises_our_class_for_each_sqlstate(code: str, name: str) -> None:
    cls = psycopg.errors.lookup(code)

    assert cls is getattr(errors, name)
    assert issubclass(cls, psycopg.DatabaseError)
    assert not issubclass(cls, psycopg.OperationalError)


def test_no_other_class_of_ours_has_a_code() -> None:
    ours = {cls.sqlstate for cls in CLASSES if issubclass(cls, FromDatabase)}

    assert ours == set(CODES)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls not in GROUPS])
def test_every_class_is_in_exactly_one_group(cls: type[FencepostError]) -> None:
    assert sum(issubclass(cls, group) for group in GROUPS) == 1


@pytest.mark.parametrize("code", CODES)
def test_an_error_of_the_server_names_field_and_hint_and_survives_pickling(code: str) -> None:
    cls = psycopg.errors.lookup(code)
    assert issubclass(cls, FromDatabase)
    error = from_server(cls)

    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(each) is cls
        assert (each.message, each.field, each.hint) == ("no longer yours", "generation", "stop")
        assert each.sqlstate == code
        assert each.diag.column_name == "generation"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not Undecodable])
def test_an_error_of_our_own_survives_pickling(cls: type[FencepostError], protocol: int) -> None:
    error = cls("told", field="tenant", hint="do this")
    again = pickle.loads(pickle.dumps(error, protocol))

    assert type(again) is cls
    assert (str(again), repr(again)) == (str(error), repr(error))
    assert (again.field, again.hint) == ("tenant", "do this")
    assert "tenant" in str(again) and "do this" in str(again)


def test_undecodable_keeps_its_reason_through_pickling() -> None:
    again = pickle.loads(pickle.dumps(Undecodable("told", reason="nul", field="/note")))

    assert (again.reason, again.field, str(again)) == ("nul", "/note", "nul: told [/note]")


def test_bound_parameters_of_the_server_are_neither_shown_nor_pickled() -> None:
    error = from_server(StaleFence)

    assert "no longer yours" in str(error)
    assert "hunter2" not in str(error) + repr(error) + repr(error.args)
    assert b"no longer yours" in pickle.dumps(error)
    assert b"hunter2" not in pickle.dumps(error)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("127.0.0.1:9092", "127.0.0.1:9092"),
        ("amqp://guest:hunter2@127.0.0.1:5672/vhost", "amqp://127.0.0.1:5672/vhost"),
        ("postgresql://u:hunter2@h/d?password=hunter2", "postgresql://h/d"),
        ("host=h port=5432 dbname=d user=u password=hunter2", "host=h port=5432 dbname=d"),
        ("u:hunter2@h:1", "h:1"),
    ],
)
def test_unreachable_names_the_address_without_its_password(address: str, shown: str) -> None:
    error = Unreachable("the broker does not answer", address=address)

    assert error.address == shown
    assert str(error) == f"the broker does not answer ({shown})"


def test_a_server_error_without_column_or_hint_is_still_complete() -> None:
    error = InvalidInput("plain\nCONTEXT: x", info={DiagnosticField.MESSAGE_PRIMARY: b"plain"})

    assert (error.message, error.field, error.hint) == ("plain", None, None)


RAISE = """
create function pg_temp.refuse(code text, secret text) returns void language plpgsql as $$
begin
    raise exception 'no longer yours' using errcode = code, column = 'generation', hint = 'stop';
end $$
"""


def test_the_server_raises_each_class_with_field_and_hint_and_without_parameters(empty_database: Database) -> None:
    with empty_database.connect(autocommit=True) as conn:
        conn.execute(RAISE)
        conn.execute("set log_parameter_max_length_on_error = -1")
        with pytest.raises(psycopg.errors.DivisionByZero) as control:
            conn.execute("select 1 / (%s::text = 'x')::int", ["hunter2"])
        assert "hunter2" in str(control.value)

        for code, name in CODES.items():
            with pytest.raises(FromDatabase) as caught:
                conn.execute("select pg_temp.refuse(%s, %s)", [code, "hunter2"])
            error = pickle.loads(pickle.dumps(caught.value))
            assert type(error) is type(caught.value) is getattr(errors, name)
            assert (error.message, error.field, error.hint) == ("no longer yours", "generation", "stop")
            assert "hunter2" not in str(caught.value) + repr(caught.value) + repr(caught.value.args)
            assert b"hunter2" not in pickle.dumps(caught.value)
