-- Renews this relay's lease on all its slots of a destination and takes free ones up to its fair share.
-- Returns every slot it owns, with the progress to continue from; `surplus` ones should be drained and released.
-- Locks: the destination row, so that leases of one destination are decided one after the other.
CREATE OR REPLACE FUNCTION fencepost.lease_slots(p_destination text, p_owner uuid, p_lease interval)
RETURNS TABLE (slot integer, generation bigint, era integer, acked_tick bigint, end_tick bigint, "position" bigint, surplus boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_share bigint;
    v_owned bigint;
BEGIN
    PERFORM fencepost._enter();
    IF p_lease IS NULL OR p_lease NOT BETWEEN interval '1 second' AND interval '10 minutes' THEN
        PERFORM fencepost._refuse('ZF003', 'lease is not between 1 second and 10 minutes', 'lease', NULL);
    END IF;
    PERFORM FROM fencepost.destination AS d WHERE d.destination = p_destination FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'the destination is not registered', 'destination', 'register it first');
    END IF;
    DELETE FROM fencepost.relay AS r
    WHERE r.destination = p_destination AND r.owner <> p_owner AND r.lease_until <= clock_timestamp();
    INSERT INTO fencepost.relay AS r (destination, owner, lease_until)
    VALUES (p_destination, p_owner, clock_timestamp() + p_lease)
    ON CONFLICT ON CONSTRAINT relay_pkey DO UPDATE SET lease_until = clock_timestamp() + p_lease;

    -- Shares differ by one slot at most and add up to all slots, so that no relay stays without one.
    SELECT i.slots / r.live + CASE WHEN r.rank <= i.slots % r.live THEN 1 ELSE 0 END
    INTO v_share
    FROM fencepost.installation AS i,
         (SELECT count(*) AS live, count(*) FILTER (WHERE l.owner <= p_owner) AS rank
          FROM fencepost.relay AS l WHERE l.destination = p_destination) AS r;
    SELECT count(*) INTO v_owned FROM fencepost.slot AS s WHERE s.destination = p_destination AND s.owner = p_owner;
    IF v_owned < v_share THEN
        -- Crash here: [S3] until this commits the slots are free; after it others take them once the lease has run out.
        UPDATE fencepost.slot AS s SET owner = p_owner, generation = s.generation + 1
        FROM (SELECT f.slot FROM fencepost.slot AS f
              WHERE f.destination = p_destination
                AND (f.owner IS NULL OR NOT EXISTS (SELECT FROM fencepost.relay AS r
                                                    WHERE r.destination = p_destination AND r.owner = f.owner))
              ORDER BY f.slot LIMIT v_share - v_owned FOR NO KEY UPDATE) AS free
        WHERE s.destination = p_destination AND s.slot = free.slot;
    END IF;

    RETURN QUERY
    SELECT s.slot, s.generation, coalesce(a.era, d.start_era), coalesce(a.acked_tick, d.start_tick),
           coalesce(a.end_tick, d.start_tick), coalesce(a.position, 0),
           row_number() OVER (ORDER BY s.slot) > v_share
    FROM fencepost.slot AS s
    JOIN fencepost.destination AS d ON d.destination = s.destination
    LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                       WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
    WHERE s.destination = p_destination AND s.owner = p_owner
    ORDER BY s.slot;
END $$;

-- Gives slots back after their pages are acked; nobody waits for the lease to run out.
CREATE OR REPLACE FUNCTION fencepost.release_slots(p_destination text, p_owner uuid, p_slots integer[])
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM fencepost._enter();
    PERFORM FROM fencepost.destination AS d WHERE d.destination = p_destination FOR NO KEY UPDATE;
    -- Crash here: [S2] until this commits others wait for the end of the lease; after it the slots are free at once.
    UPDATE fencepost.slot AS s SET owner = NULL, generation = s.generation + 1
    WHERE s.destination = p_destination AND s.owner = p_owner AND s.slot = ANY (p_slots);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    DELETE FROM fencepost.relay AS r
    WHERE r.destination = p_destination AND r.owner = p_owner
      AND NOT EXISTS (SELECT FROM fencepost.slot AS s WHERE s.destination = p_destination AND s.owner = p_owner);
    RETURN v_count;
END $$;

-- Locks the slots and refuses (ZF040) unless all of them still belong to this owner under these generations.
CREATE OR REPLACE FUNCTION fencepost._require_slots(p_destination text, p_owner uuid, p_slots integer[], p_generations bigint[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_stale integer[];
BEGIN
    PERFORM FROM fencepost.slot AS s
    WHERE s.destination = p_destination AND s.slot = ANY (p_slots) ORDER BY s.slot FOR NO KEY UPDATE;
    SELECT array_agg(u.slot ORDER BY u.slot) INTO v_stale
    FROM unnest(p_slots, p_generations) AS u (slot, generation)
    WHERE NOT EXISTS (SELECT FROM fencepost.slot AS s
                      WHERE s.destination = p_destination AND s.slot = u.slot
                        AND s.owner = p_owner AND s.generation = u.generation);
    IF v_stale IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF040', 'slots ' || array_to_string(v_stale, ', ') || ' were taken over', 'slot',
            'lease the slots again; their new owner sends what was not acked');
    END IF;
END $$;
