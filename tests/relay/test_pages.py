"""A page is exactly what its end tick sees and its start tick did not, in order, in bounded parts, by the index."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.pq import TransactionStatus

from fencepost.relay.pages import IN_ORDER, LARGE, LATE, MAIN, PageReader, Part, Progress, newest_tick
from fencepost.schemas.envelope import instant
from support.database import Database
from support.plans import WHOLE, pages
from support.relays import accept, accepted, value

SLOT_OF: LiteralString = "SELECT slot FROM fencepost.outbox LIMIT 1"
FILL: LiteralString = """
INSERT INTO fencepost.outbox (child, slot, seq, xid, era, event_id, tenant, operation, type, version, epoch, ordering_key,
    digest, recorded_at, content_type, payload)
SELECT 0, g % 16, nextval('fencepost.outbox_seq'), pg_current_xact_id(), 1, gen_random_uuid(), 'acme', 'op' || g,
    'relay.changed', 1, 1, 'k' || g, '\\x01'::bytea || sha256('x'), now(), 'application/json', convert_to(repeat('x', 200), 'UTF8')
FROM generate_series(1, 20000) AS g"""
PLANS: tuple[LiteralString, LiteralString] = ("EXPLAIN (COSTS OFF) " + MAIN, "EXPLAIN (COSTS OFF) " + LATE)


def whole(reader: PageReader, slot: int, acked: int, end: int) -> list[Part]:
    """Every part of a slot's page, read as a loop does that acks each part."""
    at = Progress(acked, end, 0)
    parts: list[Part] = []
    while True:
        (part,) = reader.read({slot: (1, at)})
        parts.append(part)
        if part.last:
            return parts
        assert part.rows and len(parts) < 1000, "a part that is not the last has rows"
        at = Progress(acked, end, part.rows[-1].seq)


def operations(parts: list[Part]) -> list[str]:
    return [row.operation for part in parts for row in part.rows]


def test_a_page_holds_what_its_end_sees_and_its_start_did_not(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as late:
        accepted(database, "a", key="k")
        accept(late, "late", "later", key="k")
        accepted(database, "b", key="k")
        newest_tick(conn, 0)
        accepted(database, "c", key="k")
        late.commit()
        newest_tick(conn, 0)
        slot = value(conn, SLOT_OF)
        reader = PageReader(conn, 1)
        assert operations(whole(reader, slot, 0, 1)) == ["a", "b"]
        assert operations(whole(reader, slot, 1, 2)) == ["late", "later", "c"]
        assert operations(whole(reader, slot, 0, 2)) == ["a", "late", "later", "b", "c"]
        assert operations(whole(reader, (slot + 1) % 16, 0, 2)) == []


def test_parts_of_any_size_make_up_the_same_page(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as late:
        for n in range(30):
            accept(late, f"late-{n}", key="k")
            accepted(database, f"early-{n}", key="k")
        newest_tick(conn, 0)
        late.commit()
        accepted(database, *[f"new-{n}" for n in range(10)], key="k")
        newest_tick(conn, 0)
        slot = value(conn, SLOT_OF)
        expected = [f"late-{n}" for n in range(30)] + [f"new-{n}" for n in range(10)]
        for rows, size in ((1, 1 << 20), (7, 1 << 20), (10, 1 << 20), (500, 1), (500, 40), (500, 1 << 20)):
            parts = whole(PageReader(conn, 1, rows_per_slot=rows, bytes_in_all=size), slot, 1, 2)
            assert operations(parts) == expected, (rows, size)
            assert max(len(part.rows) for part in parts) <= rows
            seqs = [row.seq for part in parts for row in part.rows]
            assert seqs == sorted(seqs)


def test_a_slot_that_alone_has_a_backlog_gets_larger_parts_and_the_same_page(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        accepted(database, *[f"new-{n}" for n in range(60)], key="k")
        newest_tick(conn, 0)
        slot = value(conn, SLOT_OF)
        parts = whole(PageReader(conn, 1, rows_per_slot=5, rows_in_all=40), slot, 0, 1)
        assert operations(parts) == [f"new-{n}" for n in range(60)]
        assert [len(part.rows) for part in parts] == [5, 40, 15]


def test_a_part_stays_within_its_share_of_memory_but_for_one_event(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(FILL)
        newest_tick(conn, 0)
        reader = PageReader(conn, 1, rows_per_slot=500, bytes_in_all=16 * 1000)
        parts = reader.read({slot: (1, Progress(0, 1, 0)) for slot in range(16)})
        assert {part.slot for part in parts} == set(range(16))
        assert all(len(part.rows) == 5 and not part.last for part in parts)
        # Slots that stand at different ticks do not multiply the limit.
        accepted(database, "b")
        newest_tick(conn, 0)
        parts = reader.read({slot: (1, Progress(0, 1 + slot % 2, 0)) for slot in range(16)})
        assert sum(len(row.payload) for part in parts for row in part.rows) <= 16 * (1000 + 200)


def test_a_page_that_was_read_leaves_nothing_sent_that_has_no_answer(database: Database, tmp_path: Path) -> None:
    # A Flush behind the last Sync has none: PgBouncer gives it a server connection, and to nobody else from then on.
    with database.connect(autocommit=True) as conn, (tmp_path / "wire").open("w+b") as wire:
        accepted(database, "a")
        newest_tick(conn, 0)
        conn.pgconn.trace(wire.fileno())
        parts = PageReader(conn, 1).read({slot: (1, Progress(0, 1, 0)) for slot in range(16)})
        conn.pgconn.untrace()
        assert operations(parts) == ["a"]
        wire.seek(0)
        messages = [line.split(b"\t") for line in wire.read().splitlines()]
    sent = [found[3].split()[0] for found in messages if len(found) > 3 and found[1] == b"F"]
    assert sent.count(b"Parse") >= 2, "the control: the settings and the page"
    assert sent[-1] in (b"Sync", b"Query")


def test_times_are_read_as_the_text_that_is_sent_whatever_the_zone_of_the_session(database: Database) -> None:
    times = ("2026-01-01 00:00:00+00", "2026-03-29 01:30:00.000007+02", "1999-12-31 23:59:59.999999-08")
    with database.connect(autocommit=True) as conn:
        accepted(database, *times, key="k")
        for at in times:
            conn.execute("UPDATE fencepost.outbox SET recorded_at = %s WHERE operation = %s", (at, at))
        newest_tick(conn, 0)
        conn.execute("SET TimeZone = 'Asia/Kolkata'")
        parts = whole(PageReader(conn, 1), value(conn, SLOT_OF), 0, 1)
        assert [row.recorded_at for part in parts for row in part.rows] == [
            instant(datetime.fromisoformat(at)) for at in times
        ]


def test_without_payloads_the_same_page_is_read_and_no_payload_with_it(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as late:
        accept(late, "late", key="k")
        accepted(database, "early", key="k")
        newest_tick(conn, 0)
        late.commit()
        accepted(database, *[f"new-{n}" for n in range(30)], key="k")
        newest_tick(conn, 0)
        slot = value(conn, SLOT_OF)
        with_them = whole(PageReader(conn, 1), slot, 1, 2)
        assert len(operations(with_them)) == 31 and all(row.payload for part in with_them for row in part.rows)

        for rows in (7, 500):
            reader = PageReader(conn, 1, rows_per_slot=rows, bytes_in_all=100, payloads=False)
            without = whole(reader, slot, 1, 2)
            assert operations(without) == operations(with_them)
            assert {row.payload for part in without for row in part.rows} == {b""}
            # Bytes that are not read limit nothing: one part of the late row, the others of `rows`.
            assert len(without) == 1 + 30 // rows + 1


def test_a_rolled_back_savepoint_leaves_nothing_and_hides_nothing(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as writer:
        accept(writer, "a", key="k")
        with writer.transaction():
            accept(writer, "b", key="k")
        with writer.transaction() as savepoint:
            accept(writer, "gone", key="k")
            raise psycopg.Rollback(savepoint)
        accept(writer, "c", key="k")
        newest_tick(conn, 0)
        writer.commit()
        newest_tick(conn, 0)
        assert operations(whole(PageReader(conn, 1), value(conn, SLOT_OF), 1, 2)) == ["a", "b", "c"]


def test_plan_settings_end_with_the_statement(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        accepted(database, "a")
        newest_tick(conn, 0)
        PageReader(conn, 1).read({0: (1, Progress(0, 1, 0))})
        assert value(conn, "SHOW enable_sort") == "on"
        assert conn.info.transaction_status is TransactionStatus.IDLE


@pytest.mark.parametrize("statistics", ["none", "stale", "fresh"])
def test_pages_are_read_in_the_order_of_the_index_whatever_the_statistics(database: Database, statistics: str) -> None:
    with database.connect(autocommit=True) as conn:
        for child in ("outbox_0", "outbox_1", "outbox_2"):
            conn.execute(sql.SQL("ALTER TABLE fencepost.{} SET (autovacuum_enabled = off)").format(_name(child)))
        if statistics == "stale":
            accepted(database, "a")
            conn.execute("ANALYZE fencepost.outbox")
        conn.execute(FILL)
        if statistics == "fresh":
            conn.execute("ANALYZE fencepost.outbox")
        newest_tick(conn, 0)
        snap, hint = (
            value(conn, "SELECT snap::text FROM fencepost.tick WHERE n = 1"),
            value(conn, "SELECT hint FROM fencepost.tick WHERE n = 1"),
        )
        parameters: dict[str, Any] = {
            "slots": list(range(16)),
            "positions": [0] * 16,
            "hint": 0,
            "open": "{7,8,9}",
            "ceiling": "10",
            "next": "20",
            "end_hint": hint,
            "end_snap": snap,
            "rows": 500,
            "small": 1 << 20,
            "payloads": True,
        }
        for query, start_hint in zip(PLANS, (0, hint), strict=True):
            with conn.transaction():
                conn.execute(IN_ORDER)
                plan = "\n".join(row[0] for row in conn.execute(query, parameters | {"hint": start_hint}))
            for slow in ("Sort\n", "Seq Scan", "Bitmap", "Hash", "Materialize"):
                assert slow not in plan, plan
            assert plan.count("slot_seq_idx") >= 3, plan
            assert "Index Cond: ((slot = p.slot)" in plan, plan


@pytest.mark.parametrize("statistics", ["none", "fresh"])
def test_large_payloads_are_found_by_the_index_whatever_the_statistics(database: Database, statistics: str) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(FILL)
        if statistics == "fresh":
            conn.execute("ANALYZE fencepost.outbox")
        seqs = [row[0] for row in conn.execute("SELECT seq FROM fencepost.outbox WHERE slot = 3 ORDER BY seq LIMIT 9")]
        with conn.transaction():
            conn.execute(IN_ORDER)
            query = WHOLE + LARGE
            plan = "\n".join(r[0] for r in conn.execute(query, {"slots": [3] * 9, "seqs": seqs, "bytes": 1 << 20}))
        assert "Seq Scan" not in plan and "Hash" not in plan, plan
        assert plan.count("slot_seq_idx") >= 3, plan


def test_many_large_payloads_are_looked_up_one_by_one_whatever_the_length_of_the_backlog(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(FILL)
        rows = conn.execute("SELECT slot, seq FROM fencepost.outbox ORDER BY slot, seq LIMIT 2000").fetchall()
        wanted = {"slots": [row[0] for row in rows], "seqs": [row[1] for row in rows], "bytes": 1000}
        with conn.transaction():
            conn.execute(IN_ORDER)
            plan = "\n".join(r[0] for r in conn.execute(WHOLE + LARGE, wanted))
            found = conn.execute(LARGE, wanted).fetchall()
        assert "Join Filter" not in plan and "Removed by Join" not in plan, plan
        assert plan.count("slot_seq_idx") >= 3, plan
        assert [row[0] for row in found] == [slot for slot in (0, 1) for _ in range(5)]


def test_a_part_touches_few_pages_of_a_long_backlog(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(FILL)
        newest_tick(conn, 0)
        snap, hint = (
            value(conn, "SELECT snap::text FROM fencepost.tick WHERE n = 1"),
            value(conn, "SELECT hint FROM fencepost.tick WHERE n = 1"),
        )
        with conn.transaction():
            conn.execute(IN_ORDER)
            plan = conn.execute(
                WHOLE + MAIN,
                {
                    "slots": [3],
                    "positions": [0],
                    "hint": 0,
                    "end_hint": hint,
                    "end_snap": snap,
                    "rows": 10,
                    "small": 1 << 20,
                    "payloads": True,
                },
            ).fetchall()
        read = pages(plan)
        assert read < 60, "\n".join(line for (line,) in plan)


def test_reads_under_a_pinned_snapshot_touch_no_more_pages_than_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []
    query = PageReader._query  # pyright: ignore[reportPrivateUsage]

    def looked_at(
        self: PageReader, statement: LiteralString, parameters: Mapping[str, object]
    ) -> list[tuple[Any, ...]]:
        plan = query(self, WHOLE + statement, parameters)
        touched.append(pages(plan))
        return query(self, statement, parameters)

    monkeypatch.setattr(PageReader, "_query", looked_at)
    with (
        database.connect(autocommit=True) as conn,
        database.connect() as producer,
        database.connect() as pin,
    ):
        pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        assert value(pin, "SELECT count(*) FROM fencepost.outbox") == 0
        reader, acked = PageReader(conn, 1), 0
        for n in range(200):
            accept(producer, *(f"e-{n}-{m}" for m in range(20)))
            producer.commit()
            _, end = newest_tick(conn, 0)
            found = reader.read({slot: (1, Progress(acked, end, 0)) for slot in range(16)})
            assert sum(len(part.rows) for part in found) == 20
            acked = end
        assert value(pin, "SELECT count(*) FROM fencepost.outbox") == 0
    # The first pages are those of an almost empty table; after them only the depth of the index grows.
    assert len(touched) == 200
    assert max(touched[-25:]) <= max(touched[25:50]) + 16 * 2, (touched[25:50], touched[-25:])


def _name(child: str) -> sql.Identifier:
    return sql.Identifier(child)
