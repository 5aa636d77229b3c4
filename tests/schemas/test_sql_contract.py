"""What callers see of the SQL is what was recorded, and within the window more may come but nothing may go or change."""

import copy
from collections.abc import Callable

import pytest

from fencepost.schemas import contract
from support import sql_contract
from support.database import Database
from support.sql_contract import Form, Parameter, Relation, Snapshot, broken

HINT = "run: make contract (it refuses what would break code of the window; see schemas/README.md, Rolling upgrades)"
RECORDED = sql_contract.recorded(contract.CONTRACT)


def test_what_was_recorded_of_this_contract_is_what_there_is(database18: Database) -> None:
    with database18.connect() as conn:
        found = sql_contract.read(conn)

    assert broken(RECORDED, found) == [], HINT
    assert found == RECORDED, HINT
    assert len(found["functions"]) > 100 and len(found["relations"]) > 30 and len(found["sqlstates"]) > 20


def test_every_contract_that_is_still_served_finds_what_it_was_made_for(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        declared = contract.read(conn)
        assert declared is not None
        assert sql_contract.broken_in_window(declared.serves, sql_contract.read(conn)) == []
    for number in range(declared.serves, contract.CONTRACT + 1):
        assert sql_contract.path_of(number).exists(), number


def form(found: Snapshot, name: str) -> Form:
    (only,) = found["functions"][name]["forms"]
    return only


def more_is_there(s: Snapshot) -> None:
    more = Parameter(name="p_more", type="text", default=True)
    s["functions"]["armed_too"] = copy.deepcopy(s["functions"]["armed"])
    form(s, "renew")["parameters"].append(more)
    form(s, "claim")["parameters"][2]["default"] = True
    other = copy.deepcopy(form(s, "begun"))
    other["parameters"].append(Parameter(name="p_more", type="text", default=False))
    s["functions"]["begun"]["forms"].append(other)
    s["functions"]["begun"]["roles"].append("reader")
    s["relations"]["outbox"]["columns"]["hint"] = "text"
    s["relations"]["other"] = Relation(columns={}, roles=[])
    s["sqlstates"]["ZF099"] = "Other"
    s["roles"].append("other")


def test_more_of_everything_breaks_nobody() -> None:
    more = copy.deepcopy(RECORDED)
    more_is_there(more)

    assert broken(RECORDED, more) == []
    assert broken(more, RECORDED) != [], "the way back is another matter"


def function_gone(s: Snapshot) -> None:
    del s["functions"]["renew"]


def function_renamed(s: Snapshot) -> None:
    s["functions"]["renew_lease"] = s["functions"].pop("renew")


def parameter_gone(s: Snapshot) -> None:
    form(s, "renew")["parameters"].pop()


def parameter_renamed(s: Snapshot) -> None:
    form(s, "renew")["parameters"][0]["name"] = "p_who"


def parameter_retyped(s: Snapshot) -> None:
    form(s, "renew")["parameters"][0]["type"] = "uuid"


def parameter_more_without_default(s: Snapshot) -> None:
    form(s, "renew")["parameters"].append(Parameter(name="p_more", type="text", default=False))


def default_gone(s: Snapshot) -> None:
    form(s, "claim")["parameters"][-1]["default"] = False


def second_form_takes_the_same(s: Snapshot) -> None:
    other = copy.deepcopy(form(s, "renew"))
    other["parameters"].append(Parameter(name="p_more", type="text", default=True))
    s["functions"]["renew"]["forms"].append(other)


def result_retyped(s: Snapshot) -> None:
    form(s, "armed")["returns"] = "text"


def result_column_more(s: Snapshot) -> None:
    form(s, "claim")["results"].append(["more", "text"])


def caller_gone(s: Snapshot) -> None:
    s["functions"]["renew"]["roles"].remove("executor")


def relation_gone(s: Snapshot) -> None:
    del s["relations"]["status"]


def column_gone(s: Snapshot) -> None:
    del s["relations"]["outbox"]["columns"]["payload"]


def column_retyped(s: Snapshot) -> None:
    s["relations"]["outbox"]["columns"]["payload"] = "text"


def reader_gone(s: Snapshot) -> None:
    s["relations"]["outbox"]["roles"].remove("relay")


def sqlstate_changed(s: Snapshot) -> None:
    s["sqlstates"]["ZF020"] = "Stale"


def role_gone(s: Snapshot) -> None:
    s["roles"].remove("armer")


@pytest.mark.parametrize(
    "change",
    [
        function_gone, function_renamed, parameter_gone, parameter_renamed, parameter_retyped, default_gone,
        parameter_more_without_default, second_form_takes_the_same, result_retyped, result_column_more, caller_gone,
        relation_gone, column_gone, column_retyped, reader_gone, sqlstate_changed, role_gone,
    ],
)  # fmt: skip
def test_what_would_break_code_of_the_window_is_told(change: Callable[[Snapshot], None]) -> None:
    assert broken(RECORDED, RECORDED) == []  # the control
    changed = copy.deepcopy(RECORDED)
    change(changed)

    assert len(broken(RECORDED, changed)) == 1


def test_a_record_is_renewed_by_more_and_replaced_only_on_demand(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_contract, "RECORDS", tmp_path_factory.mktemp("contracts"))
    now = contract.CONTRACT
    more, less = copy.deepcopy(RECORDED), copy.deepcopy(RECORDED)
    more_is_there(more)
    column_gone(less)
    assert sql_contract.record(now, RECORDED, unreleased=False) == []
    assert sql_contract.record(now, less, unreleased=False) != [] and sql_contract.recorded(now) == RECORDED
    assert sql_contract.record(now, more, unreleased=False) == [] and sql_contract.recorded(now) == more
    assert sql_contract.record(now, less, unreleased=True) == [] and sql_contract.recorded(now) == less

    # The next contract: what it serves still binds it, what it serves no longer does not.
    monkeypatch.setattr(contract, "CONTRACT", now + 1)
    relation_gone(less)
    assert sql_contract.record(now, less, unreleased=True) == [f"contract {now}: relation status is gone"]
    assert sql_contract.record(now + 1, less, unreleased=False) == []
    assert sql_contract.recorded(now + 1) == less
