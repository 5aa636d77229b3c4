"""Databases of other versions, as far as a program can tell."""

from psycopg import sql

from support.database import Database

DECLARING = """CREATE OR REPLACE FUNCTION fencepost.contract() RETURNS TABLE (version integer, serves integer)
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS {}"""


def declare(database: Database, version: int, serves: int) -> None:
    """From now on the database declares this contract."""
    with database.connect(autocommit=True) as conn:
        conn.execute(sql.SQL(DECLARING).format(sql.Literal(f"SELECT {version}, {serves}")))
