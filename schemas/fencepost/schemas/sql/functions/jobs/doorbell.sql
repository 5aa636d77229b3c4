-- Marks that a worker sleeps for so long; worth nothing after a crash, so its commit waits for no disk. True when every job that becomes due by a commit from now on will ring or is visible
-- to the next look; false while a writer that may have read the mark before is still open: then look again soon.
-- Locks: workers change the mark one after the other, and only for the time of this call.
CREATE OR REPLACE FUNCTION fencepost.doze_jobs(p_for interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_until bigint := (extract(epoch FROM clock_timestamp() + p_for) * 1000000)::bigint;
BEGIN
    PERFORM fencepost._enter();
    IF p_for IS NULL OR p_for NOT BETWEEN interval '0' AND interval '10 minutes' THEN
        PERFORM fencepost._refuse('ZF003', 'the sleep is not between 0 and 10 minutes', 'for', NULL);
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM pg_advisory_xact_lock(1179665234, 2);
    -- Invariant: every doze changes the mark, so that a ring for an older one cannot take it away.
    PERFORM setval('fencepost.job_doorbell', greatest(coalesce(pg_sequence_last_value('fencepost.job_doorbell'), 0) + 1, v_until));
    -- Who makes a job due locks this table before it reads the mark, and until its end.
    RETURN NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = 'fencepost.agenda'::regclass AND l.mode = 'RowExclusiveLock'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()) AND l.granted);
END $$;

-- Everybody who slept under this mark was rung: nobody rings again, unless somebody fell asleep since.
CREATE OR REPLACE FUNCTION fencepost.rung_jobs(p_mark bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM pg_advisory_xact_lock(1179665234, 2);
    IF pg_sequence_last_value('fencepost.job_doorbell') = p_mark THEN
        PERFORM setval('fencepost.job_doorbell', 0);
    END IF;
END $$;

-- Rings, if a worker sleeps, once for a transaction; whoever lets work become due that no job row tells of calls it.
CREATE OR REPLACE FUNCTION fencepost._ring_jobs() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_mark bigint := pg_sequence_last_value('fencepost.job_doorbell');
BEGIN
    IF v_mark > (extract(epoch FROM clock_timestamp()) * 1000000)::bigint THEN
        PERFORM pg_notify('fencepost_jobs', v_mark::text);
    END IF;
END $$;
