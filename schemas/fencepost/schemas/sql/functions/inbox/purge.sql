-- Forgetting. First the horizon is advanced and committed: from then on an older event is refused where nothing is known of it.
-- Only then are rows deleted, and a grace period behind it, so that copies which are a little late are still recognised.

-- Advances the horizon of a consumer to where its replay window begins now; null where it remembers for ever.
-- Waits at most two seconds for whoever changes the consumer's retention.
CREATE OR REPLACE FUNCTION fencepost.advance_horizon(p_consumer text)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_horizon timestamptz;
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    UPDATE fencepost.consumer AS c SET horizon = greatest(c.horizon, clock_timestamp() - c.replay_window)
    WHERE c.consumer = p_consumer AND c.replay_window IS NOT NULL RETURNING c.horizon INTO v_horizon;
    RETURN v_horizon;
END $$;

-- Deletes reservations of events from before the horizon and `p_grace`, about `p_batch` of them, above `p_after`; returns how
-- many it looked at, how many it deleted, and where to go on. Kept: types that are remembered for ever, and what was delivered
-- within the window by our own clock, since the clock of a sender may be behind.
-- Dead rows of earlier calls lie below `p_after` and are not walked over again, whatever snapshot is pinned.
-- Locks: reservations that nobody else holds; waits for nobody.
CREATE OR REPLACE FUNCTION fencepost.purge_reservations(
    p_consumer text, p_after timestamptz, p_batch integer, p_grace interval DEFAULT '1 hour',
    OUT looked integer, OUT purged integer, OUT after timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_consumer fencepost.consumer;
    v_before timestamptz;
    v_places tid[];
BEGIN
    PERFORM fencepost._enter();
    -- Invariant: reserve asks nobody about an event of the last hour.
    IF (p_grace >= interval '1 hour') IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the grace period is less than an hour', 'grace', 'give an hour or more');
    END IF;
    SELECT c.* INTO v_consumer FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
    v_before := clock_timestamp() - v_consumer.replay_window - p_grace;
    -- Invariant: the types are read after the horizon, so that one which was declared before it was advanced is seen.
    SELECT count(*), coalesce(max(l.event_time), p_after), array_agg(l.place) FILTER (WHERE NOT l.is_kept)
    INTO looked, after, v_places
    FROM (SELECT r.ctid AS place, r.event_time, r.last_at >= v_before
                 OR EXISTS (SELECT FROM fencepost.consumer_forever AS f WHERE f.consumer = r.consumer AND f.type = r.type) AS is_kept
          FROM fencepost.reservation AS r
          WHERE r.consumer = p_consumer AND r.event_time > p_after AND r.event_time < v_consumer.horizon - p_grace
            AND v_consumer.replay_window IS NOT NULL
          ORDER BY r.event_time FETCH FIRST (p_batch) ROWS WITH TIES) AS l;
    -- Invariant: one that arrives again meanwhile is another version of its row, in another place.
    WITH gone AS (
        DELETE FROM fencepost.reservation AS r
        WHERE r.ctid = ANY (ARRAY(SELECT o.ctid FROM fencepost.reservation AS o WHERE o.ctid = ANY (v_places) AND o.last_at < v_before
                                  FOR UPDATE SKIP LOCKED)) RETURNING 1)
    SELECT count(*) INTO purged FROM gone;
END $$;

-- The same for deliveries that no reservation was made with, by the time of their arrival: a copy of one that is gone is still
-- told by its operation.
CREATE OR REPLACE FUNCTION fencepost.purge_deliveries(
    p_consumer text, p_after timestamptz, p_batch integer, p_grace interval DEFAULT '1 hour',
    OUT looked integer, OUT purged integer, OUT after timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_before timestamptz;
BEGIN
    PERFORM fencepost._enter();
    SELECT clock_timestamp() - c.replay_window - p_grace INTO v_before FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
    WITH looked AS (
        SELECT d.ctid AS place, d.first_at, d.last_at >= v_before AS is_kept
        FROM fencepost.unreserved_delivery AS d
        WHERE d.consumer = p_consumer AND d.first_at > p_after AND d.first_at < v_before
        ORDER BY d.first_at FETCH FIRST (p_batch) ROWS WITH TIES),
    gone AS (
        DELETE FROM fencepost.unreserved_delivery AS d
        WHERE d.ctid = ANY (ARRAY(SELECT l.place FROM looked AS l WHERE NOT l.is_kept)) RETURNING 1)
    SELECT (SELECT count(*) FROM looked), (SELECT count(*) FROM gone), coalesce((SELECT max(l.first_at) FROM looked AS l), p_after)
    INTO looked, purged, after;
END $$;
