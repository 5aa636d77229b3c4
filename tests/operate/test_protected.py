"""`fencepost jobs protect|unprotect|protected`, and what `doctor` says of a protection that is not whole."""

import json

import pytest

from fencepost.schemas.errors import NotFenced
from support.command_line import Fencepost
from support.database import Database


def test_a_table_is_protected_listed_examined_and_unprotected(database18: Database, fencepost: Fencepost) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute("CREATE TABLE report (customer text, request text)")
        assert fencepost(database18, "jobs", "protected").out == "protected tables: none\n"
        columns = ("--tenant-column", "customer", "--operation-column", "request")
        assert "tenant" in fencepost(database18, "jobs", "protect", "report").line
        assert fencepost(database18, "jobs", "protect", "report", *columns).code == 0
        with pytest.raises(NotFenced):
            conn.execute("INSERT INTO report VALUES ('t', 'o')")
        (listed,) = json.loads(fencepost(database18, "jobs", "protected", "--json").out)
        assert (listed["table"], listed["tenant_column"], listed["fault"]) == ("public.report", "customer", None)
        assert "ok    protected " in fencepost(database18, "doctor").out

        conn.execute("ALTER TABLE report DISABLE TRIGGER fencepost_protected")
        assert fencepost(database18, "jobs", "protected").code == 1
        done = fencepost(database18, "doctor")
        assert done.code == 1 and "fail  protected    public.report: no enabled trigger on public.report" in done.out
        assert fencepost(database18, "jobs", "protect", "report", *columns).code == 0
        assert fencepost(database18, "doctor").code == 0

        assert fencepost(database18, "jobs", "unprotect", "report").code == 0
        conn.execute("INSERT INTO report VALUES ('t', 'o')")
        assert "not protected" in fencepost(database18, "jobs", "unprotect", "report").line
