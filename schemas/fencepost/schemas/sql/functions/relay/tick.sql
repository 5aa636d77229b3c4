-- The newest tick, after taking a new one when events became visible since and the last is old enough.
-- A tick is a stored snapshot: all that it sees, and no tick before saw, is what the next pages send.
CREATE OR REPLACE FUNCTION fencepost.tick(
    p_min_interval interval DEFAULT '0',
    OUT era integer, OUT n bigint, OUT fresh boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_tick fencepost.tick;
    v_snap pg_snapshot;
    v_hint bigint;
    v_next xid8;
    v_locked boolean := false;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'tick needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    LOOP
        SELECT t.* INTO STRICT v_tick FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
        era := v_tick.era;
        n := v_tick.n;
        fresh := false;
        -- A clock that was set back is no reason to wait for it to catch up.
        IF clock_timestamp() BETWEEN v_tick.taken_at AND v_tick.taken_at + p_min_interval THEN
            RETURN;
        END IF;
        -- The sequence moved, or a transaction that was open at the last tick has committed an event since.
        IF (SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END FROM fencepost.outbox_seq AS s) = v_tick.hint
           AND NOT EXISTS (SELECT FROM fencepost.outbox AS o WHERE o.xid = ANY (v_tick.snap_xip) AND o.seq <= v_tick.hint)
           AND NOT EXISTS (SELECT FROM fencepost.outbox AS o
                           WHERE o.xid >= v_tick.snap_xmax AND o.xid < v_tick.next AND o.seq <= v_tick.hint) THEN
            RETURN;
        END IF;
        EXIT WHEN v_locked;
        -- Locks: first the lock, then (in a later statement) the snapshot; the other order sends a row twice.
        LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
        v_locked := true;
    END LOOP;

    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT pg_current_snapshot() INTO v_snap;
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_hint FROM fencepost.outbox_seq AS s;
    SELECT pg_current_xact_id() INTO v_next;
    n := v_tick.n + 1;
    fresh := true;
    -- Crash here: [T] a tick that does not commit was never seen; no page ends at it.
    INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
    VALUES (era, n, v_snap, v_hint, v_next, pg_snapshot_xmax(v_snap), ARRAY(SELECT pg_snapshot_xip(v_snap)));
END $$;
