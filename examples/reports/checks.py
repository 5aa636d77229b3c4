"""The final check: read from the domain's tables and the provider's ledger, from nothing that could flatter us."""

from __future__ import annotations

from collections import Counter
from typing import Any

from psycopg import Connection

from . import statements

__all__ = ["violations"]


def violations(conn: Connection[Any], ledger: list[dict[str, str]]) -> list[str]:
    """One line for everything that is not as it must be: empty is the proof.

    Each submission has one report and one analysis; the receipt in it is in the ledger, for that operation; nothing
    was accepted twice; nothing was accepted for what nobody submitted.
    """
    found: list[str] = []
    by_receipt = {entry["receipt"]: entry["operation"] for entry in ledger}
    submitted: set[str] = set()
    for operation, reports, analyses, receipt in conn.execute(statements.PUBLICATIONS):
        submitted.add(operation)
        if reports != 1 or analyses != 1:
            found.append(f"{operation} was published {reports} times, with {analyses} analyses")
        if receipt is not None and by_receipt.get(receipt) != operation:
            found.append(f"{operation} was published with receipt {receipt}, which the provider did not give for it")
    for key, number in Counter(entry["key"] for entry in ledger).items():
        if number > 1:
            found.append(f"the provider accepted {number} requests under the key {key}")
    for operation, number in Counter(entry["operation"] for entry in ledger).items():
        if number > 1:
            found.append(f"the provider accepted {operation} {number} times")
        if operation not in submitted:
            found.append(f"the provider accepted {operation}, which was never submitted")
    return found
