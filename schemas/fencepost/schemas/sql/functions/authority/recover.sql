-- Brings a restored database back: under an epoch beyond the witness's, frozen, with everything held. What may have been begun
-- in what the restore lost is unknown until there is evidence; every job that is not done is suspect; nobody's lease counts.
-- Refused while the database is armed: there is nothing to recover. The caller has told the witness first.
-- Crash here: [U] until this commits the database is as disarmed as before; after it the witness's intended turn is its tip.
-- Locks: gate EXCLUSIVE, then the outbox and the jobs, so that no acceptance is under way; waits at most five seconds for each.
CREATE OR REPLACE FUNCTION fencepost.recover(
    p_installation uuid, p_next_seq bigint, p_next_nonce uuid, p_epoch bigint, p_restrictions text[], p_numbers bigint,
    p_actor text, p_reason text, p_evidence text,
    OUT epoch bigint, OUT era integer, OUT jobs bigint, OUT unknown bigint, OUT unsent bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'a recovery needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    ELSIF p_numbers IS NULL OR p_numbers NOT BETWEEN 0 AND 1000000000000 THEN
        PERFORM fencepost._refuse('ZF003', 'numbers is not between 0 and 10^12', 'numbers', NULL);
    END IF;
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    LOCK TABLE fencepost.outbox, fencepost.job IN SHARE ROW EXCLUSIVE MODE;
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    IF fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF003', 'the database is armed: there is nothing to recover', 'armed', 'see: fencepost authority status');
    ELSIF p_installation IS DISTINCT FROM (SELECT i.id FROM fencepost.installation AS i) THEN
        PERFORM fencepost._refuse('ZF002', 'the witness belongs to another installation', 'installation', 'check FENCEPOST_STATE');
    ELSIF (p_epoch > (SELECT i.epoch_counter FROM fencepost.installation AS i)) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the epoch is not beyond this database''s', 'epoch', NULL);
    ELSIF (p_next_seq > (SELECT t.seq FROM fencepost.tip AS t)) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the turn is not beyond this database''s', 'next', NULL);
    END IF;
    UPDATE fencepost.installation AS i SET epoch_counter = p_epoch, floor = p_epoch, frozen = true, era = i.era + 1,
        recovered_at = clock_timestamp(), recovered_epoch = p_epoch
    RETURNING i.era INTO era;
    epoch := p_epoch;
    unknown := fencepost._doubt_effects();
    jobs := fencepost._doubt_jobs();
    PERFORM fencepost._rebuild_agenda();
    unsent := fencepost._begin_era(era, p_numbers);
    PERFORM fencepost._note_consumers();
    DELETE FROM fencepost.relay;
    DELETE FROM fencepost.duty;
    PERFORM fencepost._take_turn(p_next_seq, p_next_nonce);
    PERFORM fencepost._restrict(p_restrictions, 'the witness says so');
    PERFORM fencepost._log_authority('recovered', jsonb_build_object('epoch', epoch, 'era', era, 'jobs', jobs, 'unknown', unknown,
        'unsent', unsent, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;

-- Effects of jobs that are not done: pending ones, and those that are said not to have happened, are unknown, for they may
-- have been begun since; attempts are forgotten, and no call counts as over before the longest of its class is.
CREATE OR REPLACE FUNCTION fencepost._doubt_effects()
RETURNS bigint LANGUAGE sql AS $$
    WITH doubted AS (
        UPDATE fencepost.effect AS e SET
            state = CASE WHEN d.doubtful THEN 'unknown' ELSE e.state END,
            version = e.version + CASE WHEN d.doubtful THEN 1 ELSE 0 END,
            reason = CASE WHEN d.doubtful THEN 'recovered' ELSE e.reason END,
            decision_id = CASE WHEN d.doubtful THEN NULL ELSE e.decision_id END,
            changed_at = CASE WHEN d.doubtful THEN clock_timestamp() ELSE e.changed_at END,
            effect_attempt = NULL,
            dispatch_deadline = clock_timestamp() + d.longest, quiescent_at = clock_timestamp() + d.longest
        FROM (SELECT o.tenant, o.operation, o.effect_key, o.state AS was, o.effect_attempt AS attempt,
                     o.state IN ('pending', 'failed_before_dispatch', 'resolved_not_applied') AS doubtful,
                     fencepost._longest_call(o.class) AS longest
              FROM fencepost.effect AS o
              JOIN fencepost.job AS j ON j.tenant = o.tenant AND j.operation = o.operation AND j.class = o.class
              WHERE j.exec <> 'done') AS d
        WHERE e.tenant = d.tenant AND e.operation = d.operation AND e.effect_key = d.effect_key
        RETURNING e.*, d.was, d.attempt, d.doubtful
    ), told AS (
        INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
        SELECT d.tenant, d.operation, d.effect_key, d.attempt, d.was, d.state, d.receipt, 'recovered', d.version
        FROM doubted AS d WHERE d.doubtful)
    SELECT count(*) FROM doubted AS d WHERE d.state = 'unknown'
$$;

-- Every job that is not done: taken away from whoever had it, suspect, and blocked, held, or as cancelled or poison as it was.
CREATE OR REPLACE FUNCTION fencepost._doubt_jobs()
RETURNS bigint LANGUAGE sql AS $$
    WITH doubted AS (
        UPDATE fencepost.job AS j SET
            exec = CASE WHEN j.exec IN ('cancelled', 'poison') THEN j.exec WHEN d.open > 0 THEN 'blocked' ELSE 'held' END,
            generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
            open_effects = d.open, applied_effects = d.applied,
            suspect = true, quiescent_at = clock_timestamp() + d.longest,
            reason = CASE WHEN j.exec IN ('cancelled', 'poison') THEN j.reason WHEN d.open > 0 THEN 'effect_unknown' ELSE 'old_epoch' END,
            detail = CASE WHEN j.exec IN ('cancelled', 'poison') THEN j.detail ELSE 'recovered' END, changed_at = clock_timestamp()
        FROM (SELECT o.tenant, o.operation, o.class, fencepost._longest_call(o.class) AS longest,
                     count(e.state) FILTER (WHERE e.state IN ('pending', 'unknown')) AS open,
                     count(e.state) FILTER (WHERE e.state IN ('success', 'resolved_applied')) AS applied
              FROM fencepost.job AS o
              LEFT JOIN fencepost.effect AS e ON e.tenant = o.tenant AND e.operation = o.operation AND e.class = o.class
              WHERE o.exec <> 'done' GROUP BY o.tenant, o.operation, o.class) AS d
        WHERE j.tenant = d.tenant AND j.operation = d.operation AND j.class = d.class
        RETURNING 1)
    SELECT count(*) FROM doubted
$$;

-- The agenda anew from the jobs, whatever was in it.
CREATE OR REPLACE FUNCTION fencepost._rebuild_agenda()
RETURNS void LANGUAGE sql AS $$
    DELETE FROM fencepost.agenda;
    INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch, fair_class)
    SELECT j.class, CASE j.exec WHEN 'queued' THEN j.priority ELSE 2147483647 END,
           greatest(CASE j.exec WHEN 'queued' THEN j.run_at ELSE j.lease_until END, clock_timestamp()),
           j.tenant, j.operation, j.generation, j.epoch,
           CASE j.exec WHEN 'queued' THEN (SELECT k.class FROM fencepost.job_class AS k WHERE k.class = j.class AND k.fair) END
    FROM fencepost.job AS j WHERE j.exec IN ('queued', 'running')
$$;

-- A new era of the outbox: what every slot has not acked is the rest of a page between its first two ticks; slots are free,
-- under new generations. Numbers go on `p_numbers` later, beyond those that were given in what the restore lost.
-- Invariant: no enqueue is under way, and every event that is there is visible to the second tick: transaction ids that this
-- server has not reached yet are another server's, and count as the oldest.
CREATE OR REPLACE FUNCTION fencepost._begin_era(p_era integer, p_numbers bigint)
RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_n bigint;
    v_hint bigint;
    v_snap pg_snapshot;
    v_unsent record;
BEGIN
    SELECT array_agg(p.destination) AS destinations, array_agg(p.slot) AS slots, array_agg(p.first) AS firsts,
           coalesce(sum(p.count) FILTER (WHERE p.destination <> '-'), 0) AS count INTO v_unsent
    FROM (
        SELECT s.destination, s.slot, min(o.seq) AS first, count(o.seq) AS count
        FROM fencepost.slot AS s
        JOIN fencepost.destination AS d ON d.destination = s.destination
        LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                           WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
        LEFT JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
        LEFT JOIN fencepost.tick AS e ON e.era = coalesce(a.era, d.start_era) AND e.n = coalesce(a.end_tick, d.start_tick)
        LEFT JOIN LATERAL (
            SELECT m.seq, m.xid FROM fencepost.outbox AS m WHERE m.slot = s.slot AND m.seq > coalesce(t.hint, 0)
            UNION ALL
            SELECT l.seq, l.xid FROM fencepost.outbox AS l
            WHERE l.slot = s.slot AND l.seq <= t.hint
              AND (l.xid = ANY (t.snap_xip) OR l.xid >= t.snap_xmax AND l.xid < t.next)) AS o
          ON NOT (o.seq <= coalesce(a.position, 0) AND coalesce(pg_visible_in_snapshot(o.xid, e.snap), false))
        GROUP BY s.destination, s.slot) AS p;
    -- Sent again with the rest of their slot, in order.
    DELETE FROM fencepost.parked AS p
    USING unnest(v_unsent.destinations, v_unsent.slots, v_unsent.firsts) AS u (destination, slot, first)
    WHERE p.destination = u.destination AND p.slot = u.slot AND p.seq >= u.first;

    SELECT pg_current_snapshot() INTO v_snap;
    UPDATE fencepost.outbox AS o SET xid = '3' WHERE o.xid >= pg_snapshot_xmin(v_snap);
    PERFORM setval('fencepost.outbox_seq', greatest(s.last_value + p_numbers, 1), s.is_called OR p_numbers > 0)
    FROM fencepost.outbox_seq AS s;
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_hint FROM fencepost.outbox_seq AS s;
    SELECT coalesce(max(t.n), 0) + 1 INTO v_n FROM fencepost.tick AS t;
    DELETE FROM fencepost.tick;
    INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
    VALUES (p_era, v_n, '3:3:', 0, '3', '3', '{}'),
           (p_era, v_n + 1, v_snap, v_hint, pg_current_xact_id(), pg_snapshot_xmax(v_snap), ARRAY(SELECT pg_snapshot_xip(v_snap)));
    UPDATE fencepost.destination SET start_era = p_era, start_tick = v_n + 1;
    UPDATE fencepost.slot AS s SET owner = NULL, generation = s.generation + 1;
    INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation)
    SELECT i.ack_child, s.destination, s.slot, nextval('fencepost.ack_seq'), p_era,
           CASE WHEN u.first IS NULL THEN v_n + 1 ELSE v_n END,
           CASE WHEN u.first = 1 THEN v_n ELSE v_n + 1 END,
           CASE WHEN u.first IS NULL THEN 0 ELSE u.first - 1 END, s.generation
    FROM fencepost.slot AS s
    JOIN unnest(v_unsent.destinations, v_unsent.slots, v_unsent.firsts) AS u (destination, slot, first)
      ON u.destination = s.destination AND u.slot = s.slot
    CROSS JOIN fencepost.installation AS i;
    RETURN v_unsent.count;
END $$;

-- Notes a begin of a job that this database does not have, as a runner's journal says; false when it is noted already.
CREATE OR REPLACE FUNCTION fencepost.note_lost_begin(p_tenant text, p_operation text, p_class text, p_effect_key text, p_effect_attempt uuid)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    INSERT INTO fencepost.lost_begin (tenant, operation, class, effect_key, effect_attempt)
    VALUES (p_tenant, p_operation, p_class, p_effect_key, p_effect_attempt) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;
