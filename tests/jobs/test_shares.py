"""What each of several classes gets of one claim: by what is due and not hidden, each with its own limits and turns."""

import json
from datetime import UTC, datetime, timedelta

from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.fence import complete
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import Conn, given

CLASSES = ("a.first", "b.second", "c.third")


def took(conn: Conn, limit: int, *classes: str, hint: str | None = None) -> list[Job]:
    return claim(conn, "w", classes or CLASSES, limit, hint)


def prioritized(conn: Conn, late: str = "", **priorities: int) -> None:
    """A job in each class, named by its letter, with this priority, and due in an hour where it is late."""
    for name in CLASSES:
        letter = name[0]
        given(conn, letter, job_class=name)
        conn.execute(
            "UPDATE fencepost.job SET priority = %(p)s, run_at = run_at + %(l)s * interval '1 h' WHERE operation = %(o)s",
            {"p": priorities[letter], "o": letter, "l": int(letter == late)},
        )


def hiding(job_class: str, priority: int) -> str:
    """A hint that says that nothing of this priority is left before an hour from now."""
    mark = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    return json.dumps({"priorities": {job_class: {str(priority): mark}}})


def test_what_is_due_later_takes_no_part_of_the_claim(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        prioritized(conn, late="a", a=9, b=0, c=5)
        assert [job.operation for job in took(conn, 1)] == ["c"], "the more urgent one of what is due"
        conn.execute("UPDATE fencepost.job SET run_at = clock_timestamp() WHERE operation = 'a'")
        assert [job.operation for job in took(conn, 1)] == ["a"]


def test_what_a_hint_hides_takes_no_part_of_the_claim(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        prioritized(conn, a=9, b=0, c=5)
        assert [job.operation for job in took(conn, 1, hint=hiding("a.first", 9))] == ["c"]
        assert [job.operation for job in took(conn, 1)] == ["a"]


def test_a_hint_about_one_class_hides_nothing_of_another(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        prioritized(conn, a=9, b=0, c=5)
        assert {str(job.operation) for job in took(conn, 10, hint=hiding("a.first", 9))} == {"b", "c"}
        assert [job.operation for job in took(conn, 10)] == ["a"]


def test_a_claim_counts_what_it_has_of_a_class_against_the_limit_of_no_other(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for name in CLASSES[:2]:
            for n in range(2):
                given(conn, f"{name[0]}-{n}", tenant=f"of-{name}", job_class=name)
            register_class(conn, JobClassPolicy(as_class(name), limit=1))
        assert {str(job.operation) for job in took(conn, 10, *CLASSES[:2])} == {"a-0", "b-0"}
        assert took(conn, 10, *CLASSES[:2]) == []


def test_tenants_of_a_fair_class_without_a_limit_are_served_in_turn(database18: Database) -> None:
    name = CLASSES[0]
    with database18.connect(autocommit=True) as conn:
        for tenant, count in (("t", 3), ("u", 1)):
            for n in range(count):
                given(conn, f"{tenant}-{n}", tenant=tenant, job_class=name)
        register_class(conn, JobClassPolicy(as_class(name), fair=True))
        assert [str(job.tenant) for job in took(conn, 2, name)] == ["t", "u"]


def test_a_claim_that_serves_nobody_leaves_the_turn_where_it_was(database18: Database) -> None:
    name = CLASSES[0]
    with database18.connect(autocommit=True) as conn:
        for tenant in ("t", "u"):
            for n in range(2):
                given(conn, f"{tenant}-{n}", tenant=tenant, job_class=name)
        register_class(conn, JobClassPolicy(as_class(name), limit=1, fair=True))
        served: list[str] = []
        for _ in range(4):
            (job,) = took(conn, 1, name)
            assert took(conn, 1, name) == [], "at its limit"
            served.append(str(job.tenant))
            complete(conn, job.fence)
        assert served == ["t", "u", "t", "u"]
