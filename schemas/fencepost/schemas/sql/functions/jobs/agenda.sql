-- Whenever a job becomes queued, or is queued anew at another time, priority or epoch, the agenda points to it; whoever
-- made it so. So does a lease that became shorter, which only an operator or a test does by hand.
CREATE OR REPLACE FUNCTION fencepost._agenda()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch, fair_class)
    VALUES (NEW.class, CASE NEW.exec WHEN 'queued' THEN NEW.priority ELSE 2147483647 END,
        greatest(CASE NEW.exec WHEN 'queued' THEN NEW.run_at ELSE NEW.lease_until END, clock_timestamp()),
        NEW.tenant, NEW.operation, NEW.generation, NEW.epoch,
        CASE NEW.exec WHEN 'queued' THEN (SELECT k.class FROM fencepost.job_class AS k WHERE k.class = NEW.class AND k.fair) END);
    -- Rings only while a worker sleeps (see doze_jobs), and for what is due; one look at a sequence otherwise.
    IF NEW.exec = 'queued' AND pg_sequence_last_value('fencepost.job_doorbell') > 0 AND NEW.run_at <= clock_timestamp() THEN
        PERFORM fencepost._ring_jobs();
    END IF;
    RETURN NULL;
END $$;
-- Locks: none where the triggers exist.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.job'::regclass AND tgname = 'agenda_insert') THEN
        CREATE TRIGGER agenda_insert AFTER INSERT ON fencepost.job FOR EACH ROW
        WHEN (NEW.exec = 'queued') EXECUTE FUNCTION fencepost._agenda();
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.job'::regclass AND tgname = 'agenda_update') THEN
        CREATE TRIGGER agenda_update AFTER UPDATE ON fencepost.job FOR EACH ROW
        WHEN (NEW.exec = 'queued' AND (OLD.exec <> 'queued' OR NEW.run_at <> OLD.run_at OR NEW.priority <> OLD.priority
                                       OR NEW.epoch <> OLD.epoch OR NEW.generation <> OLD.generation)
              OR NEW.lease_until < OLD.lease_until)
        EXECUTE FUNCTION fencepost._agenda();
    END IF;
END $$;

-- The priorities of a class that hold jobs: those that the marks name, from their marks on, and those between them that have
-- come since. Walks over nothing that lies in a priority with a mark.
CREATE OR REPLACE FUNCTION fencepost._priorities(p_class text, p_marks jsonb)
RETURNS TABLE (priority integer, mark timestamptz) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE known AS MATERIALIZED (
        SELECT m.key::integer AS priority, m.value::timestamptz AS mark
        FROM jsonb_each_text(coalesce(p_marks -> 'priorities' -> p_class, '{}')) AS m WHERE m.key::integer < 2147483646
    ), gap (low, high) AS (
        SELECT e.priority, lead(e.priority, 1, 2147483646) OVER (ORDER BY e.priority)
        FROM (SELECT k.priority FROM known AS k UNION ALL SELECT -2147483648) AS e
    ), found (priority, high) AS (
        SELECT f.priority, g.high FROM gap AS g, LATERAL (
            SELECT a.priority FROM fencepost.agenda AS a
            WHERE a.class = p_class AND a.priority > g.low AND a.priority < g.high ORDER BY a.priority LIMIT 1) AS f
        UNION ALL
        SELECT f.priority, n.high FROM found AS n, LATERAL (
            SELECT a.priority FROM fencepost.agenda AS a
            WHERE a.class = p_class AND a.priority > n.priority AND a.priority < n.high ORDER BY a.priority LIMIT 1) AS f
    )
    SELECT k.priority, k.mark FROM known AS k UNION ALL SELECT f.priority, '-infinity' FROM found AS f ORDER BY 1 DESC;
END $$;

-- Up to where the agenda is used up, by class and priority, for the next claims: what is behind a mark is gone for good, and
-- no claim needs to walk over it, whatever snapshots are held. A hint and nothing more: without it, with an old one or a
-- wrong one a claim takes no job that it may not take. Give back what the last call returned; start anew without it now
-- and then, which also finds what a clock that was set back may have hidden. Call it in a transaction of its own.
-- Invariant: a mark never passes a row that is there, nor the time at which this function last noted its transaction;
-- whoever wrote before that has ended by then, and whoever wrote after it wrote rows that were due later.
CREATE OR REPLACE FUNCTION fencepost.marks(p_classes text[], p_marks jsonb DEFAULT NULL)
RETURNS jsonb LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_noted timestamptz := (p_marks ->> 'noted')::timestamptz;
    v_class text;
    v_priorities jsonb := '{}';
BEGIN
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RETURN p_marks;
    ELSIF v_noted IS NOT NULL AND (v_noted > v_now OR pg_snapshot_xmin(pg_current_snapshot()) < (p_marks ->> 'xid')::xid8) THEN
        -- A writer of that time is still at work; or the clock went back, and nothing that was noted holds.
        RETURN CASE WHEN v_noted > v_now THEN NULL ELSE p_marks END;
    END IF;
    IF v_noted IS NOT NULL THEN
        FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
            PERFORM fencepost._forget_pointers(v_class, l.priority, l.mark, v_now) FROM fencepost._priorities(v_class, p_marks) AS l;
            -- Also of priorities that hold nothing at this moment: the default, and those of the newest claims.
            v_priorities := v_priorities || jsonb_build_object(v_class, (
                SELECT jsonb_object_agg(l.priority, least(v_noted, f.due)) FROM (
                    SELECT k.priority, max(k.mark) AS mark FROM (
                        SELECT p.priority, p.mark FROM fencepost._priorities(v_class, p_marks) AS p
                        UNION ALL
                        SELECT r.n, (p_marks -> 'priorities' -> v_class ->> r.n::text)::timestamptz FROM (VALUES (2147483646), (2147483647)) AS r (n)
                        UNION ALL
                        SELECT 0, '-infinity'
                        UNION ALL
                        SELECT j.priority, '-infinity' FROM (
                            SELECT a.tenant, a.operation FROM fencepost.agenda AS a
                            WHERE a.class = v_class AND a.priority = 2147483647 ORDER BY a.due DESC LIMIT 100) AS c
                        CROSS JOIN LATERAL (
                            SELECT i.priority FROM fencepost.job AS i
                            WHERE i.tenant = c.tenant AND i.operation = c.operation AND i.class = v_class OFFSET 0) AS j) AS k
                    GROUP BY k.priority) AS l
                LEFT JOIN LATERAL (
                    SELECT a.due FROM fencepost.agenda AS a
                    WHERE a.class = v_class AND a.priority = l.priority AND a.due >= coalesce(l.mark, '-infinity')
                    ORDER BY a.due LIMIT 1) AS f ON true));
        END LOOP;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN jsonb_build_object('noted', v_now, 'xid', pg_current_xact_id()::text, 'priorities', v_priorities);
END $$;

-- Removes pointers of a priority that no longer fit their job (it was cancelled, queued anew, released under another epoch, or
-- is held under an old one: its release points to it again), among the first of it, and further on where all of these were such.
-- In a class that is fair, marks those from transactions that began before it was.
CREATE OR REPLACE FUNCTION fencepost._forget_pointers(p_class text, p_priority integer, p_mark timestamptz, p_now timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_limit integer;
    v_count integer;
BEGIN
    FOREACH v_limit IN ARRAY ARRAY[100, 10000] LOOP
        -- Invariant: a pointer that was stale in one snapshot stays so; a job queued since then has another.
        DELETE FROM fencepost.agenda AS x WHERE x.ctid = ANY (ARRAY(
            SELECT a.ctid FROM fencepost.agenda AS a
            LEFT JOIN LATERAL (
                SELECT i.exec, i.generation, i.priority, i.run_at, i.epoch FROM fencepost.job AS i
                WHERE i.tenant = a.tenant AND i.operation = a.operation AND i.class = a.class OFFSET 0) AS j ON true
            WHERE a.ctid = ANY (ARRAY(
                SELECT h.ctid FROM fencepost.agenda AS h
                WHERE h.class = p_class AND h.priority = p_priority AND h.due >= p_mark AND h.due <= p_now ORDER BY h.due LIMIT v_limit))
              AND (j.exec = 'queued' AND j.generation = a.generation AND j.priority = a.priority AND j.run_at <= p_now
                   AND j.epoch = a.epoch AND j.epoch >= fencepost._epoch(a.tenant)) IS NOT TRUE
            FOR UPDATE OF a SKIP LOCKED));
        GET DIAGNOSTICS v_count = ROW_COUNT;
        EXIT WHEN v_count < v_limit;
    END LOOP;
    UPDATE fencepost.agenda AS x SET fair_class = p_class WHERE x.ctid = ANY (ARRAY(
        SELECT a.ctid FROM fencepost.agenda AS a
        WHERE a.fair_class IS NULL AND a.ctid = ANY (ARRAY(
            SELECT h.ctid FROM fencepost.agenda AS h
            WHERE h.class = p_class AND h.priority = p_priority AND h.due >= p_mark AND h.due <= p_now ORDER BY h.due LIMIT 1000))
        FOR UPDATE OF a SKIP LOCKED))
      AND (SELECT k.fair FROM fencepost.job_class AS k WHERE k.class = p_class);
END $$;
