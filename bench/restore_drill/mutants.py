"""Guards taken out of the restored database, one at a time: the drill must notice each, at the step that is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import LiteralString

import psycopg

__all__ = ["MUTANTS", "Mutant"]

DEFINITION: LiteralString = "SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p WHERE p.oid = %(name)s::regproc"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One text of one function replaced by another; ``red`` begins the line of a check that must fail for it."""

    name: str
    function: str
    was: str
    becomes: str
    red: tuple[str, ...]

    def apply(self, dsn: str) -> None:
        """Changes the function; LookupError unless the text is there exactly once."""
        with psycopg.connect(dsn, autocommit=True) as conn:
            row = conn.execute(DEFINITION, {"name": f"fencepost.{self.function}"}).fetchone()
            assert row is not None
            body = str(row[0])
            if body.count(self.was) != 1:
                raise LookupError(f"mutant {self.name}: {self.function} has changed; the mutant must follow it")
            conn.execute(body.replace(self.was, self.becomes).encode())


MUTANTS: dict[str, Mutant] = {
    m.name: m
    for m in (
        Mutant(
            "ticket not checked",
            "_enter",
            "IF NOT fencepost.armed() THEN",
            "IF false THEN",
            ("3: claim", "4: publish"),
        ),
        Mutant(
            "epoch counted from the database",
            "recover",
            "LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;",
            "LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;\n"
            "    p_epoch := (SELECT i.epoch_counter + 1 FROM fencepost.installation AS i);",
            ("5: the epoch",),
        ),
        Mutant(
            "failed_before_dispatch kept",
            "_doubt_effects",
            "o.state IN ('pending', 'failed_before_dispatch', 'resolved_not_applied')",
            "o.state IN ('pending', 'resolved_not_applied')",
            ("5: what needs evidence", "8: nothing was dispatched twice"),
        ),
        Mutant(
            "effect_attempt kept",
            "_doubt_effects",
            "effect_attempt = NULL,",
            "effect_attempt = e.effect_attempt,",
            ("5: A records that it never sent",),
        ),
    )
}
