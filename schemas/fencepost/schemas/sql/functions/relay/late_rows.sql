-- Slots with rows below the earlier tick's hint that only the later tick sees, and where these rows begin.
CREATE OR REPLACE FUNCTION fencepost.late_rows(p_era integer, p_start bigint, p_end bigint)
RETURNS TABLE (slot integer, first_seq bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_start fencepost.tick;
    v_end fencepost.tick;
BEGIN
    SELECT t.* INTO v_start FROM fencepost.tick AS t WHERE t.era = p_era AND t.n = p_start;
    SELECT t.* INTO v_end FROM fencepost.tick AS t WHERE t.era = p_era AND t.n = p_end;
    IF v_start.n IS NULL OR v_end.n IS NULL THEN
        PERFORM fencepost._refuse('ZF040', 'the ticks of this page are gone', 'slot', 'lease the slots again: they moved on');
    END IF;
    RETURN QUERY
    SELECT late.slot, min(late.seq) FROM (
        SELECT o.slot, o.seq, o.xid FROM fencepost.outbox AS o WHERE o.xid = ANY (v_start.snap_xip)
        UNION ALL
        SELECT o.slot, o.seq, o.xid FROM fencepost.outbox AS o WHERE o.xid >= v_start.snap_xmax AND o.xid < v_start.next) AS late
    WHERE late.seq <= v_start.hint AND pg_visible_in_snapshot(late.xid, v_end.snap)
    GROUP BY late.slot;
END $$;
