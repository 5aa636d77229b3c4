"""Moves what waits in Procrastinate into jobs, in one transaction for each batch: every job is in exactly one queue.

export DATABASE=postgresql://localhost/app
python from_procrastinate.py --tenant acme send_mail=mail.send make_report=report.make

Run it again and again while old workers drain what they have begun, and after the last deployment that still defers there.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any, LiteralString

import psycopg
from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.submit import submit

WAITING: LiteralString = """
SELECT id, task_name, args, priority, scheduled_at FROM procrastinate_jobs
WHERE status = 'todo' AND task_name = ANY (%(tasks)s) ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
"""
REMOVE: LiteralString = "SELECT procrastinate_cancel_job_v1(u.id, false, true) FROM unnest(%(ids)s::bigint[]) AS u (id)"


def move(conn: Connection[Any], tenant: str, classes: Mapping[str, str], limit: int = 500) -> int:
    """Moves up to ``limit`` waiting jobs in the caller's transaction; how many there were.

    What a worker has locked at this moment stays where it is. The operation is the old identity, so a job that was
    moved before is not moved twice. Raises InvalidInput naming the member of args that jobs do not carry (a float).
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        found = cursor.execute(WAITING, {"tasks": list(classes), "limit": limit}).fetchall()
        for number, task, args, priority, scheduled_at in found:
            submit(
                conn,
                classes[task],
                tenant=tenant,
                operation=f"procrastinate-{number}",
                args=args,
                priority=priority,
                run_at=scheduled_at,
            )
        cursor.execute(REMOVE, {"ids": [row[0] for row in found]})
    return len(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenant", required=True)
    parser.add_argument("classes", nargs="+", metavar="TASK=CLASS")
    given = parser.parse_args()
    named = dict(pair.split("=", 1) for pair in given.classes)
    total = 0
    with psycopg.connect(os.environ.get("DATABASE", "postgresql://localhost/app")) as database:
        while count := move(database, given.tenant, named):
            database.commit()
            total += count
    print(f"{total} jobs moved")
