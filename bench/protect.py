"""What protecting a table costs: microseconds for each row, as the best of several fenced inserts with and without it.

python bench/protect.py [--rows 20000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "compose")]

import psycopg

from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.fence import fence
from fencepost.jobs.protect import protect
from fencepost.jobs.submit import submit
from fencepost.schemas.identity import as_class
from stack.obtain import obtain_postgres
from stack.postgres import MAJORS
from support.database import Databases


def seconds(conn: psycopg.Connection[tuple[object, ...]], table: str, rows: int) -> float:
    """One statement that inserts this many rows behind the fence of its operation, taken back afterwards."""
    (job,) = claim(conn, "bench", ["bench"], 1)
    conn.commit()
    fence(conn, job.fence)
    started = time.perf_counter()
    conn.execute(
        f"INSERT INTO {table} SELECT 't', 'o', n FROM generate_series(1, %(rows)s) AS n".encode(), {"rows": rows}
    )
    took = time.perf_counter() - started
    conn.rollback()
    conn.execute("UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 s' WHERE exec = 'running'")
    conn.commit()
    return took


def main() -> None:
    """Prints one line."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rows", type=int, default=20_000)
    given.add_argument("--rounds", type=int, default=5)
    chosen = given.parse_args()
    server = obtain_postgres(MAJORS[0])
    try:
        with tempfile.TemporaryDirectory() as folder:
            databases = Databases(server.address, Path(folder))
            database = databases.migrated()
            with database.connect() as conn:
                register_class(
                    conn, JobClassPolicy(name=as_class("bench"), max_attempts=1000, backoff_max=0, backoff_base=0)
                )
                submit(conn, "bench", tenant="t", operation="o", args={})
                for table in ("plain", "guarded"):
                    conn.execute(f"CREATE TABLE {table} (tenant text, operation text, n integer)".encode())
                protect(conn, "guarded", tenant="tenant", operation="operation")
                conn.commit()
                best = {
                    table: min(seconds(conn, table, chosen.rows) for _ in range(chosen.rounds))
                    for table in ("plain", "guarded")
                }
            databases.drop(database)
            databases.close()
    finally:
        server.close()
    each = {table: took / chosen.rows * 1e6 for table, took in best.items()}
    print(
        f"{chosen.rows} rows: plain {each['plain']:.2f} µs a row, protected {each['guarded']:.2f},"
        f" so protection costs {each['guarded'] - each['plain']:.2f} µs a row"
    )


if __name__ == "__main__":
    main()
