-- Where every slot stands at every destination, as recorded: its newest ack, else the tick the destination started at.
CREATE OR REPLACE FUNCTION fencepost._progress()
RETURNS TABLE (destination text, slot integer, era integer, acked_tick bigint)
LANGUAGE sql STABLE AS $$
    SELECT s.destination, s.slot, coalesce(a.era, d.start_era), coalesce(a.acked_tick, d.start_tick)
    FROM fencepost.slot AS s
    JOIN fencepost.destination AS d ON d.destination = s.destination
    LEFT JOIN LATERAL (SELECT k.era, k.acked_tick FROM fencepost.ack AS k
                       WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
$$;

-- Whether a child of the outbox holds a row, committed as far as this statement sees.
CREATE OR REPLACE FUNCTION fencepost._has_events(p_child smallint)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM fencepost.outbox AS o WHERE o.child = p_child)
$$;

-- Why a child of the outbox is still needed; null when every row is acked everywhere and the retention is over.
-- With `p_since`, rows that this snapshot sees were proved to be acked before, at the same destinations.
CREATE OR REPLACE FUNCTION fencepost._needed(p_child smallint, p_since pg_snapshot DEFAULT NULL)
RETURNS text LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    v_installation fencepost.installation;
    v_child fencepost.outbox_child;
    v_kept_from timestamptz;
    v_open xid8[] := ARRAY(SELECT pg_snapshot_xip(p_since));
    v_unseen boolean;
    v record;
BEGIN
    SELECT * INTO STRICT v_installation FROM fencepost.installation;
    SELECT * INTO STRICT v_child FROM fencepost.outbox_child AS c WHERE c.child = p_child;
    v_kept_from := clock_timestamp() - v_installation.retention;
    IF v_child.closed_at > v_kept_from OR EXISTS (
        SELECT FROM generate_series(0, v_installation.slots - 1) AS s
        CROSS JOIN LATERAL (SELECT FROM fencepost.outbox AS o
                            WHERE o.child = p_child AND o.slot = s AND o.seq > v_child.closed_seq
                              AND o.recorded_at > v_kept_from LIMIT 1) AS late) THEN
        RETURN 'its retention is not over';
    ELSIF NOT EXISTS (SELECT FROM fencepost.destination AS d WHERE d.destination <> '-') THEN
        RETURN 'no destination is registered yet';
    END IF;
    -- Invariant: a row below a snapshot's xmin is visible in it, so only the rest is looked at, by the index on xid.
    FOR v IN SELECT p.destination, p.era, p.slots, t.snap
             FROM (SELECT g.destination, g.era, g.acked_tick, array_agg(g.slot) AS slots
                   FROM fencepost._progress() AS g GROUP BY g.destination, g.era, g.acked_tick) AS p
             LEFT JOIN fencepost.tick AS t ON t.era = p.era AND t.n = p.acked_tick
             ORDER BY p.destination, p.acked_tick LOOP
        IF v.era <> v_installation.era THEN
            RETURN 'destination ' || v.destination || ' has not finished its era';
        ELSIF v.snap IS NULL THEN
            RETURN 'the acked tick of destination ' || v.destination || ' is missing';
        ELSIF p_since IS NULL THEN
            v_unseen := EXISTS (SELECT FROM fencepost.outbox AS o
                                WHERE o.child = p_child AND o.xid >= pg_snapshot_xmin(v.snap) AND (o.slot + 0) = ANY (v.slots)
                                  AND NOT pg_visible_in_snapshot(o.xid, v.snap));
        ELSE
            v_unseen := EXISTS (SELECT FROM fencepost.outbox AS o
                                WHERE o.child = p_child AND (o.xid = ANY (v_open) OR o.xid >= pg_snapshot_xmax(p_since))
                                  AND (o.slot + 0) = ANY (v.slots) AND NOT pg_visible_in_snapshot(o.xid, v.snap));
        END IF;
        IF v_unseen THEN
            RETURN 'destination ' || v.destination || ' has not acked it';
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Who holds a table: sessions by their process ids, prepared transactions by their names.
CREATE OR REPLACE FUNCTION fencepost._holders(p_tables regclass[])
RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(string_agg(DISTINCT coalesce('prepared transaction ' || p.gid, 'session ' || l.pid), ', '), 'nobody any more')
    FROM pg_locks AS l
    -- A prepared transaction has no process; the lock on its own id tells which one it is.
    LEFT JOIN pg_locks AS x ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid'
                               AND x.virtualtransaction = l.virtualtransaction
    LEFT JOIN pg_prepared_xacts AS p ON p.transaction = x.transactionid
    WHERE l.locktype = 'relation' AND l.relation = ANY (p_tables) AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
$$;

-- One step of recycling the outbox: truncates a child that nothing needs any more, or else opens the next child when it
-- is empty and the current one is old enough. Outcome: recycled, opened, kept, locked (detail: why, or by whom) or idle.
-- Locks: recycled EXCLUSIVE, destination SHARE, then the child ACCESS EXCLUSIVE, waiting at most `p_patience`; enqueue into the current child never waits for it.
CREATE OR REPLACE FUNCTION fencepost.recycle_outbox(
    p_min_age interval DEFAULT '1 minute', p_patience interval DEFAULT '200 ms',
    OUT outcome text, OUT child smallint, OUT detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_installation fencepost.installation;
    v_child smallint;
    v_table text;
    v_why text;
    v_since pg_snapshot;
    v_destinations text[];
    v_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'recycling needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('lock_timeout', greatest(1, (extract(epoch FROM p_patience) * 1000)::integer)::text, true);
    outcome := 'idle';
    detail := '';
    BEGIN
        -- Two at once would both read the child and then both want it for themselves.
        LOCK TABLE fencepost.recycled IN EXCLUSIVE MODE;
    EXCEPTION WHEN lock_not_available THEN
        detail := 'another step of recycling is under way';
        PERFORM set_config('lock_timeout', v_timeout, true);
        RETURN;
    END;
    SELECT * INTO STRICT v_installation FROM fencepost.installation;
    -- The next child is the oldest.
    FOREACH v_child IN ARRAY ARRAY[(v_installation.outbox_child + 1) % 3, (v_installation.outbox_child + 2) % 3]::smallint[] LOOP
        CONTINUE WHEN NOT fencepost._has_events(v_child);
        v_table := 'fencepost.outbox_' || v_child;
        -- Invariant: the snapshot is older than the proof, so that what it sees was looked at.
        SELECT pg_current_snapshot(), ARRAY(SELECT d.destination FROM fencepost.destination AS d ORDER BY 1)
        INTO v_since, v_destinations;
        v_why := fencepost._needed(v_child);
        IF v_why IS NULL THEN
            -- Locks: first the lock, then (in later statements) the proof: the row of a writer that is still open is
            -- invisible to a proof, and would go with the rest once it has committed.
            BEGIN
                -- A destination that is being registered may start at a tick whose page is in this child.
                LOCK TABLE fencepost.destination IN SHARE MODE;
                EXECUTE 'LOCK TABLE ' || v_table || ' IN ACCESS EXCLUSIVE MODE';
            EXCEPTION WHEN lock_not_available THEN
                outcome := 'locked';
                child := v_child;
                detail := 'held by ' || fencepost._holders(ARRAY['fencepost.destination', v_table]::regclass[]);
                EXIT;
            END;
            -- Only what came meanwhile is looked at while everybody waits; a new destination may need the rest too.
            IF v_destinations <> ARRAY(SELECT d.destination FROM fencepost.destination AS d ORDER BY 1) THEN
                v_since := NULL;
            END IF;
            v_why := fencepost._needed(v_child, v_since);
            IF v_why IS NULL THEN
                PERFORM fencepost._note_recycled(v_child);
                -- Crash here: [Y2] what is noted as gone goes with this commit, or neither happened.
                EXECUTE 'TRUNCATE ' || v_table;
                outcome := 'recycled';
                child := v_child;
                EXIT;
            END IF;
        END IF;
        IF outcome = 'idle' THEN
            outcome := 'kept';
            child := v_child;
            detail := v_why;
        END IF;
    END LOOP;
    IF outcome <> 'recycled' AND fencepost._open_child(v_installation.outbox_child, p_min_age) THEN
        outcome := 'opened';
        child := (v_installation.outbox_child + 1) % 3;
        detail := '';
    END IF;
    PERFORM set_config('lock_timeout', v_timeout, true);
END $$;

-- Remembers what is about to go, so that nobody takes the rest for everything.
CREATE OR REPLACE FUNCTION fencepost._note_recycled(p_child smallint)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_child fencepost.outbox_child;
    v_seq bigint;
    v_recorded timestamptz;
BEGIN
    SELECT * INTO STRICT v_child FROM fencepost.outbox_child AS c WHERE c.child = p_child;
    SELECT max(o.seq), max(o.recorded_at) FILTER (WHERE o.seq > v_child.closed_seq) INTO v_seq, v_recorded
    FROM fencepost.installation AS i, generate_series(0, i.slots - 1) AS s
    CROSS JOIN LATERAL (
        (SELECT l.seq, l.recorded_at FROM fencepost.outbox AS l
         WHERE l.child = p_child AND l.slot = s AND l.seq > v_child.closed_seq)
        UNION ALL
        (SELECT n.seq, n.recorded_at FROM fencepost.outbox AS n
         WHERE n.child = p_child AND n.slot = s ORDER BY n.seq DESC LIMIT 1)) AS o;
    UPDATE fencepost.recycled AS r
    SET seq = greatest(r.seq, v_seq), recorded_at = greatest(r.recorded_at, v_child.closed_at, v_recorded),
        era = p.era, tick = CASE WHEN r.era = p.era THEN greatest(r.tick, p.tick) ELSE p.tick END
    FROM (SELECT max(e.era) AS era, max(e.tick) AS tick
          FROM (SELECT max(g.era) AS era, min(g.acked_tick) AS tick FROM fencepost._progress() AS g GROUP BY g.slot) AS e) AS p;
END $$;

-- Opens the next child if it is empty and the current one holds events for long enough: half the retention, so that
-- three children keep at most one and a half times what was asked for.
CREATE OR REPLACE FUNCTION fencepost._open_child(p_current smallint, p_min_age interval)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_next smallint := (p_current + 1) % 3;
    v_seq bigint;
BEGIN
    IF fencepost._has_events(v_next) OR NOT fencepost._has_events(p_current) OR NOT EXISTS (
        SELECT FROM fencepost.installation AS i, fencepost.outbox_child AS c
        WHERE c.child = p_current AND c.opened_at + greatest(i.retention / 2, p_min_age) <= clock_timestamp()) THEN
        RETURN false;
    END IF;
    BEGIN
        UPDATE fencepost.installation SET outbox_child = v_next WHERE outbox_child = p_current;
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- Invariant: the number is read before the time, so that every number up to it was drawn before closed_at.
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_seq FROM fencepost.outbox_seq AS s;
    UPDATE fencepost.outbox_child AS c SET closed_seq = v_seq, closed_at = clock_timestamp() WHERE c.child = p_current;
    UPDATE fencepost.outbox_child AS c SET opened_at = clock_timestamp() WHERE c.child = v_next;
    RETURN true;
END $$;

-- Once the acks have grown beyond `p_bytes`, keeps the newest of each slot in the other child and truncates this one.
-- Locks: recycled EXCLUSIVE, slot EXCLUSIVE, so that no ack and no lease is under way, waiting at most `p_patience`.
CREATE OR REPLACE FUNCTION fencepost.recycle_acks(
    p_bytes bigint DEFAULT 4194304, p_patience interval DEFAULT '200 ms', OUT outcome text, OUT detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_child smallint;
    v_other smallint;
    v_table text;
    v_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'recycling needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    SELECT i.ack_child, 1 - i.ack_child INTO STRICT v_child, v_other FROM fencepost.installation AS i;
    v_table := 'fencepost.ack_' || v_child;
    outcome := 'idle';
    detail := '';
    IF pg_relation_size(v_table::regclass) < p_bytes THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', greatest(1, (extract(epoch FROM p_patience) * 1000)::integer)::text, true);
    BEGIN
        LOCK TABLE fencepost.recycled, fencepost.slot IN EXCLUSIVE MODE;
        EXECUTE 'LOCK TABLE ' || v_table || ' IN ACCESS EXCLUSIVE MODE';
        UPDATE fencepost.installation SET ack_child = v_other WHERE ack_child = v_child;
    EXCEPTION WHEN lock_not_available THEN
        outcome := 'locked';
        detail := 'held by ' || fencepost._holders(ARRAY['fencepost.recycled', 'fencepost.slot', v_table]::regclass[]);
        PERFORM set_config('lock_timeout', v_timeout, true);
        RETURN;
    END;
    IF FOUND THEN
        INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation, at)
        SELECT v_other, a.destination, a.slot, a.n, a.era, a.acked_tick, a.end_tick, a.position, a.generation, a.at
        FROM fencepost.slot AS s
        CROSS JOIN LATERAL (SELECT k.* FROM fencepost.ack AS k
                            WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a
        WHERE a.child = v_child;
        -- Crash here: [Y3] the newest acks are moved with this commit, or neither happened.
        EXECUTE 'TRUNCATE ' || v_table;
        outcome := 'recycled';
    END IF;
    PERFORM set_config('lock_timeout', v_timeout, true);
END $$;

-- Deletes ticks that no slot needs any more, at most `p_batch`, above `p_after`; returns where to go on.
-- Dead rows of earlier calls lie below `p_after` and are not walked over again, whatever snapshot is pinned.
CREATE OR REPLACE FUNCTION fencepost.purge_ticks(p_after bigint, p_batch integer, OUT purged integer, OUT after bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET lock_timeout = '200ms' AS $$
DECLARE
    v_era integer;
    v_needed bigint;
    v_last bigint;
BEGIN
    PERFORM fencepost._enter();
    after := p_after;
    purged := 0;
    BEGIN
        LOCK TABLE fencepost.recycled IN EXCLUSIVE MODE;
        -- A destination that is being registered may start at an old tick.
        LOCK TABLE fencepost.destination IN SHARE MODE;
    EXCEPTION WHEN lock_not_available THEN
        RETURN;
    END;
    SELECT t.era INTO STRICT v_era FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
    -- Both ticks of a page that is under way, recorded or not, are at or above the acked one.
    SELECT min(p.acked_tick) INTO v_needed FROM fencepost._progress() AS p
    HAVING bool_and(p.era = v_era);
    IF v_needed IS NULL THEN
        RETURN;
    END IF;
    SELECT max(b.n) INTO v_last
    FROM (SELECT t.n FROM fencepost.tick AS t WHERE t.era = v_era AND t.n > p_after AND t.n < v_needed ORDER BY t.n LIMIT p_batch) AS b;
    IF v_last IS NOT NULL THEN
        -- Crash here: [Y4] the batch goes with this commit; the next holder of the duty begins from the oldest tick.
        DELETE FROM fencepost.tick AS t WHERE t.era = v_era AND t.n > p_after AND t.n <= v_last;
        GET DIAGNOSTICS purged = ROW_COUNT;
        after := v_last;
    END IF;
END $$;

-- Forgets identities of events whose replay window is over, at most `p_batch`, recorded at `p_after` or later; returns
-- where to go on. Kept as long as the event itself is in the outbox or parked.
CREATE OR REPLACE FUNCTION fencepost.purge_event_keys(
    p_after timestamptz, p_batch integer, OUT purged integer, OUT after timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    PERFORM fencepost._enter();
    WITH looked AS (
        SELECT k.ctid AS place, k.recorded_at,
               EXISTS (SELECT FROM fencepost.parked AS p WHERE p.event_id = k.event_id) AS is_parked
        FROM fencepost.event_key AS k
        -- An event may have been recorded a moment before the child it chose was opened.
        WHERE k.recorded_at >= p_after AND k.recorded_at < (
            SELECT least(clock_timestamp() - i.replay_window,
                         (SELECT min(c.opened_at) - interval '1 minute' FROM fencepost.outbox_child AS c
                          WHERE fencepost._has_events(c.child)))
            FROM fencepost.installation AS i)
        ORDER BY k.recorded_at LIMIT p_batch FOR UPDATE OF k SKIP LOCKED),
    gone AS (
        DELETE FROM fencepost.event_key AS k
        WHERE k.ctid = ANY (ARRAY(SELECT l.place FROM looked AS l WHERE NOT l.is_parked)) RETURNING 1)
    SELECT (SELECT count(*) FROM gone), coalesce((SELECT max(l.recorded_at) FROM looked AS l), p_after) INTO purged, after;
END $$;

-- Declares how long events stay in the outbox and how long operations are remembered; nulls leave a value as it is.
CREATE OR REPLACE FUNCTION fencepost.set_retention(
    p_retention interval, p_replay_window interval, p_actor text, p_reason text,
    OUT retention interval, OUT replay_window interval)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    SELECT coalesce(p_retention, i.retention), coalesce(p_replay_window, i.replay_window) INTO STRICT retention, replay_window
    FROM fencepost.installation AS i FOR NO KEY UPDATE;
    IF retention NOT BETWEEN interval '0' AND interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'retention is not between nothing and ten years', 'retention', NULL);
    ELSIF replay_window NOT BETWEEN retention AND interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'the replay window is shorter than the retention, or longer than ten years', 'replay_window',
            'an event that can still be sent again must still be recognised');
    END IF;
    UPDATE fencepost.installation AS i SET retention = set_retention.retention, replay_window = set_retention.replay_window;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'retention', p_actor, p_reason, 'outbox', retention::text || ', ' || replay_window::text);
END $$;
