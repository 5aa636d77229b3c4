-- Records progress of slots after the broker's confirms; sets refused events aside, and says what was overtaken, in the same
-- commit.
-- Refused as a whole (ZF040) when one slot was taken over: its new owner sends that page again, with the same bytes.
CREATE OR REPLACE FUNCTION fencepost.ack(
    p_destination text, p_owner uuid, p_slots integer[], p_generations bigint[], p_era integer,
    p_acked_ticks bigint[], p_end_ticks bigint[], p_positions bigint[],
    p_park_slots integer[] DEFAULT '{}', p_park_seqs bigint[] DEFAULT '{}', p_park_reasons text[] DEFAULT '{}',
    p_park_details text[] DEFAULT '{}', p_park_overtaken bigint[] DEFAULT '{}', p_park_retry interval[] DEFAULT '{}',
    p_overtaken_slots integer[] DEFAULT '{}', p_overtaken_seqs bigint[] DEFAULT '{}', p_overtaken_by bigint[] DEFAULT '{}')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_slots(p_destination, p_owner, p_slots, p_generations);
    IF p_era <> (SELECT i.era FROM fencepost.installation AS i) THEN
        PERFORM fencepost._refuse('ZF040', 'a new era has begun', 'era', 'lease the slots again');
    END IF;
    -- Crash here: [A] between confirm and this commit: the page is sent again by whoever owns the slot next.
    INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation)
    SELECT i.ack_child, p_destination, u.slot, nextval('fencepost.ack_seq'), p_era, u.acked, u.ending, u.position, u.generation
    FROM unnest(p_slots, p_generations, p_acked_ticks, p_end_ticks, p_positions) AS u (slot, generation, acked, ending, position),
         fencepost.installation AS i;
    IF cardinality(p_overtaken_seqs) > 0 THEN
        DELETE FROM fencepost.overtaken AS g
        WHERE g.at < clock_timestamp() - (SELECT i.replay_window FROM fencepost.installation AS i);
        INSERT INTO fencepost.overtaken AS g (destination, seq, overtaken_by, tenant, ordering_key, operation, type)
        SELECT p_destination, o.seq, u.overtaken_by, o.tenant, o.ordering_key, o.operation, o.type
        FROM unnest(p_overtaken_slots, p_overtaken_seqs, p_overtaken_by) AS u (slot, seq, overtaken_by)
        JOIN fencepost.outbox AS o ON o.slot = u.slot AND o.seq = u.seq
        WHERE o.slot = ANY (p_slots)
        -- Sent again once more after a lost lease.
        ON CONFLICT (destination, seq) DO UPDATE SET overtaken_by = excluded.overtaken_by, at = excluded.at;
    END IF;
    IF cardinality(p_park_seqs) > 0 THEN
        INSERT INTO fencepost.parked (destination, slot, tenant, ordering_key, seq, event_id, operation, type, version, epoch,
            digest, recorded_at, content_type, attributes, reference, payload, reason, detail, overtaken_by, attempts, next_try_at)
        SELECT p_destination, o.slot, o.tenant, o.ordering_key, o.seq, o.event_id, o.operation, o.type, o.version, o.epoch,
               o.digest, o.recorded_at, o.content_type, o.attributes, o.reference, o.payload, u.reason, u.detail,
               -- A later one may have got through while this one still had no answer.
               coalesce(u.overtaken, (SELECT g.overtaken_by FROM fencepost.overtaken AS g
                                      WHERE g.destination = p_destination AND g.seq = o.seq)),
               CASE u.reason WHEN 'behind' THEN 0 ELSE 1 END,
               CASE WHEN u.retry IS NULL THEN NULL ELSE clock_timestamp() + u.retry END
        FROM unnest(p_park_slots, p_park_seqs, p_park_reasons, p_park_details, p_park_overtaken, p_park_retry)
             AS u (slot, seq, reason, detail, overtaken, retry)
        JOIN fencepost.outbox AS o ON o.slot = u.slot AND o.seq = u.seq
        WHERE o.slot = ANY (p_slots);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count <> cardinality(p_park_seqs) THEN
            PERFORM fencepost._refuse('ZF003', 'a parked event is not in the outbox', 'park_seqs', NULL);
        END IF;
        -- What its relay set aside behind an event that is no longer there (skipped meanwhile, or a later number of a key
        -- whose writers did not take turns) waits for nothing.
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        FROM unnest(p_park_slots, p_park_seqs) AS u (slot, seq)
        WHERE k.destination = p_destination AND k.slot = u.slot AND k.seq = u.seq AND k.reason = 'behind'
          AND (NOT EXISTS (SELECT FROM fencepost.parked AS e
                           WHERE e.destination = k.destination AND e.slot = k.slot AND e.tenant = k.tenant
                             AND e.ordering_key = k.ordering_key AND e.seq < k.seq)
               OR 'pass' = (SELECT d.on_refusal FROM fencepost.destination AS d WHERE d.destination = p_destination));
    END IF;
END $$;

-- Records one retry of a parked event: published ones leave, and the key flows again with its last one.
CREATE OR REPLACE FUNCTION fencepost.retried(
    p_destination text, p_owner uuid, p_slot integer, p_generation bigint, p_tenant text, p_ordering_key text, p_seq bigint,
    p_published boolean, p_reason text, p_detail text, p_retry interval)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_slots(p_destination, p_owner, ARRAY[p_slot], ARRAY[p_generation]);
    IF p_published THEN
        -- Crash here: [Q2] until this commits it stays parked and is sent again; with it the next of its key is due.
        DELETE FROM fencepost.parked AS k
        WHERE k.destination = p_destination AND k.slot = p_slot AND k.tenant = p_tenant
          AND k.ordering_key = p_ordering_key AND k.seq = p_seq;
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        WHERE k.destination = p_destination AND k.slot = p_slot AND k.tenant = p_tenant AND k.ordering_key = p_ordering_key
          AND k.seq = (SELECT min(f.seq) FROM fencepost.parked AS f
                       WHERE f.destination = p_destination AND f.slot = p_slot AND f.tenant = p_tenant
                         AND f.ordering_key = p_ordering_key);
    ELSE
        UPDATE fencepost.parked AS k SET attempts = k.attempts + 1, reason = p_reason, detail = p_detail,
               next_try_at = clock_timestamp() + p_retry
        WHERE k.destination = p_destination AND k.slot = p_slot AND k.tenant = p_tenant
          AND k.ordering_key = p_ordering_key AND k.seq = p_seq;
    END IF;
END $$;
