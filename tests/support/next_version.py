"""A next version of everything, made from this one: its own copy of the sources, with a newer contract and newer SQL.

It has what an upgrade inside the window may have: columns more, a function with a default parameter more, a newer form of
a function beside the older one, another body behind an old form; and code that needs what is new.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from fencepost.schemas import contract

ROOT = Path(__file__).parents[2]
WINGS = ("schemas", "relay", "consumer", "jobs", "operate")
CLAIMED = "fencepost.claim(%(owner)s, %(classes)s, %(limit)s, %(marks)s::jsonb"
PROGRESS = "CREATE OR REPLACE FUNCTION fencepost.progress(p_tenant text, p_operation text, p_class text)"

TABLES = """ALTER TABLE fencepost.job ADD COLUMN claimed_with text;
ALTER TABLE fencepost.outbox ADD COLUMN hint text;
ALTER TABLE fencepost.reservation ADD COLUMN hint text DEFAULT 'none';
"""
# Neither form can be meant where the other one is: they differ in how many arguments must be given.
CLAIM = """CREATE OR REPLACE FUNCTION fencepost.claim(
    p_owner text, p_classes text[], p_limit integer, p_marks jsonb, p_with text)
RETURNS TABLE (tenant text, operation text, class text, generation bigint, attempt uuid, owner text, epoch bigint, mode text,
               attempts integer, max_attempts integer, args bytea, source_event uuid, lease_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    FOR tenant, operation, class, generation, attempt, owner, epoch, mode, attempts, max_attempts, args, source_event, lease_ms
    IN SELECT c.* FROM fencepost.claim(p_owner, p_classes, p_limit, p_marks) AS c LOOP
        UPDATE fencepost.job AS j SET claimed_with = p_with
        WHERE j.tenant = claim.tenant AND j.operation = claim.operation AND j.class = claim.class;
        RETURN NEXT;
    END LOOP;
END $$;
"""


def path_of(root: Path) -> str:
    """The PYTHONPATH of the version whose sources are here."""
    return os.pathsep.join(str(root / wing) for wing in WINGS)


def make(root: Path) -> Path:
    """Copies this version's sources to ``root`` and makes the next version of them."""
    for wing in WINGS:
        shutil.copytree(
            ROOT / wing / "fencepost", root / wing / "fencepost", ignore=shutil.ignore_patterns("__pycache__")
        )
    schemas, now = root / "schemas" / "fencepost" / "schemas", contract.CONTRACT
    sql = schemas / "sql"
    # The new code needs the new database; that one serves the old code.
    _edit(schemas / "contract.py", (f"\nCONTRACT = {now}\n", f"\nCONTRACT = {now + 1}\n"))
    _edit(schemas / "contract.py", (f"\nOLDEST = {contract.OLDEST}\n", f"\nOLDEST = {now + 1}\n"))
    declared = sql / "functions" / "authority" / "contract.sql"
    text, count = re.subn(r"SELECT \d+, \d+\n", f"SELECT {now + 1}, {now}\n", declared.read_text())
    assert count == 1
    declared.write_text(text)
    (sql / "tables" / "9001_next.sql").write_text(TABLES)
    (sql / "functions" / "jobs" / "zz_claim.sql").write_text(CLAIM)
    more = PROGRESS.removesuffix(")") + ", p_current boolean DEFAULT true)"
    gone = "DROP FUNCTION IF EXISTS fencepost.progress(text, text, text);\n"
    _edit(sql / "functions" / "jobs" / "progress.sql", (PROGRESS, gone + more))
    _edit(sql / "functions" / "inbox" / "reserve.sql", (" AS $$\n", " AS $$\n-- The body of the next version.\n"))
    _edit(root / "jobs" / "fencepost" / "jobs" / "claim.py", (CLAIMED, f"{CLAIMED}, 'next'"))
    return root


def _edit(path: Path, change: tuple[str, str]) -> None:
    text = path.read_text()
    assert change[0] in text, (path.name, change[0])
    path.write_text(text.replace(*change, 1))
