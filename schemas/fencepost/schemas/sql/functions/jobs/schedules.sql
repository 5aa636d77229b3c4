-- Registers a schedule of this worker's code and says under which version, or null: another definition is current and
-- its workers live, or an operator removed it. A starting worker's definition always becomes current; one that runs takes
-- over once nobody of the current version was seen for two minutes.
-- A changed definition goes on where the old one was: from the first instant that is overdue, else from now.
-- Locks: the schedule's row.
CREATE OR REPLACE FUNCTION fencepost.register_schedule(
    p_schedule text, p_class text, p_tenant text, p_timetable text, p_missed text, p_worker text, p_starting boolean)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_was fencepost.schedule;
    v_now timestamptz;
BEGIN
    PERFORM fencepost._require_identity('schedule', p_schedule);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('timetable', p_timetable);
    PERFORM fencepost._require_identity('owner', p_worker);
    IF p_missed IS NULL OR p_missed NOT IN ('skip', 'last', 'all') THEN
        PERFORM fencepost._refuse('ZF003', 'missed is not skip, last or all', 'missed', NULL);
    END IF;
    IF p_starting THEN
        v_now := clock_timestamp();
        INSERT INTO fencepost.schedule (schedule, class, tenant, timetable, missed, era, position, seen_at, seen_by)
        SELECT p_schedule, p_class, p_tenant, p_timetable, p_missed, i.era, v_now, v_now, p_worker FROM fencepost.installation AS i
        ON CONFLICT (schedule) DO NOTHING;
    END IF;
    SELECT s.* INTO v_was FROM fencepost.schedule AS s WHERE s.schedule = p_schedule FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF (v_was.class, v_was.tenant, v_was.timetable, v_was.missed) = (p_class, p_tenant, p_timetable, p_missed) THEN
        UPDATE fencepost.schedule AS s SET seen_at = v_now, seen_by = p_worker WHERE s.schedule = p_schedule;
        RETURN v_was.version;
    ELSIF NOT p_starting AND v_was.seen_at > v_now - interval '2 minutes' THEN
        RETURN NULL;
    END IF;
    UPDATE fencepost.schedule AS s SET class = p_class, tenant = p_tenant, timetable = p_timetable, missed = p_missed,
        version = s.version + 1, position = least(v_now, coalesce(s.next_at - interval '1 microsecond', s.position)), next_at = NULL,
        seen_at = v_now, seen_by = p_worker, registered_at = v_now
    WHERE s.schedule = p_schedule;
    RETURN v_was.version + 1;
END $$;

-- Takes one schedule that is due, among those of these versions, and says up to where it was submitted and what time it is.
-- Whoever took it has it until the end of the transaction, in which it submits and advances; others pass it by.
-- In a new era it starts anew: what was submitted before the restore is not known, and doing it twice is worse than late.
-- Locks: gate, then one schedule's row, skipping what others hold.
CREATE OR REPLACE FUNCTION fencepost.take_schedule(p_schedules text[], p_versions integer[], p_worker text)
RETURNS TABLE (schedule text, "position" timestamptz, now timestamptz, restored boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_due fencepost.schedule;
    v_era integer;
    v_now timestamptz;
BEGIN
    PERFORM fencepost._require_identity('owner', p_worker);
    PERFORM fencepost._enter();
    SELECT s.* INTO v_due FROM fencepost.schedule AS s
    JOIN unnest(p_schedules, p_versions) AS u (schedule, version) ON s.schedule = u.schedule AND s.version = u.version
    WHERE s.next_at IS NULL OR s.next_at <= (SELECT clock_timestamp())
    ORDER BY s.next_at NULLS FIRST, s.schedule LIMIT 1 FOR NO KEY UPDATE OF s SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT i.era INTO STRICT v_era FROM fencepost.installation AS i;
    v_now := clock_timestamp();
    UPDATE fencepost.schedule AS s SET seen_at = v_now, seen_by = p_worker, era = v_era,
        position = CASE s.era WHEN v_era THEN s.position ELSE v_now END, next_at = CASE s.era WHEN v_era THEN s.next_at END
    WHERE s.schedule = v_due.schedule;
    RETURN QUERY SELECT v_due.schedule, CASE v_due.era WHEN v_era THEN v_due.position ELSE v_now END, v_now, v_due.era <> v_era;
END $$;

-- Moves a schedule on, in the transaction that took it and submitted what was due. The position never goes back.
CREATE OR REPLACE FUNCTION fencepost.advance_schedule(
    p_schedule text, p_position timestamptz, p_next_at timestamptz, p_last_at timestamptz, p_submitted integer, p_missed integer)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE fencepost.schedule AS s SET position = p_position, next_at = p_next_at, last_at = coalesce(p_last_at, s.last_at),
        submitted = s.submitted + p_submitted, missed_count = s.missed_count + p_missed
    WHERE s.schedule = p_schedule AND s.position <= p_position;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such schedule, or it is further on', 'position', 'take it first');
    END IF;
END $$;

-- Says that workers of these versions are there, at most three times a minute for each schedule.
CREATE OR REPLACE FUNCTION fencepost.see_schedules(p_schedules text[], p_versions integer[], p_worker text)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE fencepost.schedule AS s SET seen_at = clock_timestamp(), seen_by = p_worker
    WHERE s.schedule = ANY (ARRAY(
        SELECT o.schedule FROM fencepost.schedule AS o
        JOIN unnest(p_schedules, p_versions) AS u (schedule, version) ON o.schedule = u.schedule AND o.version = u.version
        WHERE o.seen_at < clock_timestamp() - interval '20 seconds' ORDER BY o.schedule FOR NO KEY UPDATE OF o SKIP LOCKED))
$$;

-- Forgets a schedule that no worker's code has any more; its jobs stay. Refused while a worker of it is seen.
CREATE OR REPLACE FUNCTION fencepost.remove_schedule(p_schedule text, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_was fencepost.schedule;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT s.* INTO v_was FROM fencepost.schedule AS s WHERE s.schedule = p_schedule FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such schedule', 'schedule', 'see: fencepost jobs schedules list');
    ELSIF v_was.seen_at > clock_timestamp() - interval '1 minute' THEN
        PERFORM fencepost._refuse('ZF003', 'a worker with this schedule was seen within the last minute', 'seen_at',
            'take it out of the code and stop those workers first');
    END IF;
    DELETE FROM fencepost.schedule AS s WHERE s.schedule = p_schedule;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, subject, verdict)
    VALUES (gen_random_uuid(), 'remove_schedule', p_actor, p_reason, v_was.tenant, p_schedule, 'removed');
END $$;
