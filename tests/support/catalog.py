"""What a schema is, read from PostgreSQL's catalog, so that two ways of making it can be compared."""

from typing import Any, LiteralString

import psycopg

QUERIES: tuple[LiteralString, ...] = (
    """SELECT 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attstorage::text,
              pg_get_expr(d.adbin, d.adrelid)
       FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
       WHERE c.relnamespace = 'fencepost'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'v')""",
    """SELECT 'constraint', conrelid::regclass::text, conname::text, pg_get_constraintdef(oid)
       FROM pg_constraint WHERE connamespace = 'fencepost'::regnamespace AND contype <> 'n'""",
    "SELECT 'index', indexdef FROM pg_indexes WHERE schemaname = 'fencepost'",
    """SELECT 'trigger', pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
       WHERE c.relnamespace = 'fencepost'::regnamespace AND NOT t.tgisinternal""",
    "SELECT 'view', viewname::text, definition FROM pg_views WHERE schemaname = 'fencepost'",
    """SELECT 'function', p.oid::regprocedure::text, p.prosrc, p.prosecdef, p.proconfig::text, p.proacl::text
       FROM pg_proc p WHERE p.pronamespace = 'fencepost'::regnamespace""",
)


def describe(conn: psycopg.Connection[Any]) -> set[tuple[Any, ...]]:
    """Columns, constraints, indexes, triggers, views and functions of the schema `fencepost`."""
    return {tuple(row) for query in QUERIES for row in conn.execute(query).fetchall()}
