"""`make contract`: what callers see of the SQL, recorded for each contract number; what breaks code of the window is found.

    PYTHONPATH=tests:compose python -m support.sql_contract [--unreleased]

Recorded are public functions (parameters, defaults, results, roles), the relations that roles may read, SQLSTATEs and
roles. Within the window only more may come: functions, forms of a function, trailing parameters with a default, columns.
`--unreleased` replaces a record that no release has, whatever has changed in it.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, LiteralString, TypedDict

from psycopg import Connection

from fencepost.schemas import contract, errors, grants
from fencepost.schemas.errors import FromDatabase
from stack.obtain import obtain_postgres
from stack.postgres import MAJORS
from support.database import Databases

RECORDS = Path(__file__).parents[2] / "schemas" / "contracts"

FLAT = re.compile(r"""\{[^{}]*"default"[^{}]*\}|\[(?:\s*"[^"]*",?)+\s*\]""")

FUNCTIONS: LiteralString = """
SELECT p.proname, p.pronargs, p.pronargdefaults, coalesce(p.proargnames, '{}'),
       ARRAY(SELECT format_type(t, NULL) FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) WITH ORDINALITY AS a (t, n)
             ORDER BY n),
       coalesce(p.proargmodes::text[], '{}'), format_type(p.prorettype, NULL), p.proretset
FROM pg_proc AS p WHERE p.pronamespace = 'fencepost'::regnamespace AND p.proname = ANY (%(names)s)
ORDER BY p.proname, p.pronargs, 5"""
COLUMNS: LiteralString = """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relname = ANY (%(names)s) ORDER BY c.relname, a.attnum"""


class Parameter(TypedDict):
    """One that a caller gives; those with a default may be left out."""

    name: str
    type: str
    default: bool


class Form(TypedDict):
    """One function of a name; ``results`` are its columns, where it has any."""

    parameters: list[Parameter]
    returns: str
    results: list[list[str]]


class Function(TypedDict):
    """Every form of a name, and who may call it."""

    forms: list[Form]
    roles: list[str]


class Relation(TypedDict):
    """A table or view, and who may read it."""

    columns: dict[str, str]
    roles: list[str]


class Snapshot(TypedDict):
    """What callers see of one contract."""

    contract: int
    functions: dict[str, Function]
    relations: dict[str, Relation]
    sqlstates: dict[str, str]
    roles: list[str]


def read(conn: Connection[Any]) -> Snapshot:
    """What this database and this code have."""
    functions = {name: Function(forms=[], roles=sorted(roles)) for name, roles in sorted(grants.FUNCTIONS.items())}
    for name, given, defaults, names, types, modes, returns, several in conn.execute(
        FUNCTIONS, {"names": list(functions)}
    ):
        inward = [n for n, mode in enumerate(modes or ["i"] * len(types)) if mode in "iv"]
        assert len(inward) == given
        parameters = [
            Parameter(name=names[n] if names else "", type=types[n], default=at >= given - defaults)
            for at, n in enumerate(inward)
        ]
        results = [[names[n], types[n]] for n in range(len(types)) if n not in inward]
        returns = f"setof {returns}" if several else returns
        functions[name]["forms"].append(Form(parameters=parameters, returns=returns, results=results))
    relations = {name: Relation(columns={}, roles=sorted(roles)) for name, roles in sorted(grants.TABLES.items())}
    for relation, column, type_ in conn.execute(COLUMNS, {"names": list(relations)}):
        relations[relation]["columns"][column] = type_
    found = (getattr(errors, name) for name in errors.__all__)
    codes = {
        c.sqlstate: c.__name__
        for c in found
        if isinstance(c, type) and issubclass(c, FromDatabase) and c.sqlstate and FromDatabase in c.__mro__[1:3]
    }
    return Snapshot(
        contract=contract.CONTRACT,
        functions=functions,
        relations=relations,
        sqlstates=dict(sorted(codes.items())),
        roles=list(grants.ROLES),
    )


def broken(old: Snapshot, new: Snapshot) -> list[str]:
    """What code that was made for the old one would miss in the new one, or find changed; empty where only more came."""
    return [
        *(f"role {role} is gone" for role in old["roles"] if role not in new["roles"]),
        *(
            f"SQLSTATE {code} is no longer {name}"
            for code, name in old["sqlstates"].items()
            if new["sqlstates"].get(code) != name
        ),
        *_relations(old["relations"], new["relations"]),
        *_functions(old["functions"], new["functions"]),
    ]


def _relations(old: dict[str, Relation], new: dict[str, Relation]) -> Iterator[str]:
    for name, was in old.items():
        now = new.get(name)
        if now is None:
            yield f"relation {name} is gone"
            continue
        yield from (f"{name} may not be read by {r}" for r in was["roles"] if r not in now["roles"])
        for column, type_ in was["columns"].items():
            if now["columns"].get(column) != type_:
                yield f"column {name}.{column} is no longer {type_}"


def _functions(old: dict[str, Function], new: dict[str, Function]) -> Iterator[str]:
    for name, was in old.items():
        now = new.get(name)
        if now is None or not now["forms"]:
            yield f"function {name} is gone"
            continue
        yield from (f"{name} may not be called by {r}" for r in was["roles"] if r not in now["roles"])
        for form in was["forms"]:
            if not any(_serves(each, form) for each in now["forms"]):
                yield f"{_told(name, form)} cannot be called as before, or returns something else"
            elif any(len(_meant(now["forms"], form, count)) != 1 for count in _counts(form)):
                yield f"{_told(name, form)} is ambiguous: another form takes the same arguments"


def _serves(now: Form, was: Form) -> bool:
    """Whether every call of the old form means this one, and its caller finds what it expects."""
    first, more = now["parameters"][: len(was["parameters"])], now["parameters"][len(was["parameters"]) :]
    return (
        [(p["name"], p["type"]) for p in first] == [(p["name"], p["type"]) for p in was["parameters"]]
        and all(p["default"] or not q["default"] for p, q in zip(first, was["parameters"], strict=True))
        and all(p["default"] for p in more)
        and (now["returns"], now["results"]) == (was["returns"], was["results"])
    )


def _counts(form: Form) -> range:
    """With how many arguments it can be called."""
    return range(sum(not p["default"] for p in form["parameters"]), len(form["parameters"]) + 1)


def _meant(forms: list[Form], call: Form, count: int) -> list[Form]:
    """The forms that a call with the first arguments of ``call`` may mean."""
    types = [p["type"] for p in call["parameters"][:count]]
    return [f for f in forms if count in _counts(f) and [p["type"] for p in f["parameters"][:count]] == types]


def _told(name: str, form: Form) -> str:
    return f"{name}({', '.join(p['name'] for p in form['parameters'])})"


def path_of(number: int) -> Path:
    """Where the record of a contract is."""
    return RECORDS / f"{number}.json"


def recorded(number: int) -> Snapshot:
    """The record of a contract."""
    found: Snapshot = json.loads(path_of(number).read_text())
    return found


def broken_in_window(serves: int, new: Snapshot) -> list[str]:
    """What code of the contracts that are still served would miss."""
    return [
        f"contract {number}: {what}"
        for number in range(serves, contract.CONTRACT)
        for what in broken(recorded(number), new)
    ]


def written(snapshot: Snapshot) -> str:
    """As JSON with one line for each parameter, list of results and list of roles: what changed is seen in a diff."""
    text = json.dumps(snapshot, indent=1, sort_keys=True)
    return FLAT.sub(lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text) + "\n"


def record(serves: int, new: Snapshot, *, unreleased: bool) -> list[str]:
    """Writes the record of this contract, or returns why not."""
    path = path_of(contract.CONTRACT)
    found = broken_in_window(serves, new)
    if path.exists() and not unreleased:
        found += broken(recorded(contract.CONTRACT), new)
    if not found:
        path.write_text(written(new))
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, closing(obtain_postgres(MAJORS[0])) as server:
        databases = Databases(server.address, Path(folder))
        made = databases.migrated()
        try:
            with made.connect(autocommit=True) as conn:
                declared, found = contract.read(conn), read(conn)
        finally:
            databases.drop(made)
            databases.close()
    assert declared is not None
    refused = record(declared.serves, found, unreleased="--unreleased" in sys.argv[1:])
    for line in refused:
        print(line)
    if refused:
        print("keep the old form, or raise the contract and what it serves (schemas/README.md, Rolling upgrades)")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
