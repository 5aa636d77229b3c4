-- Locks the job, then looks: refuses (ZF020, naming the first part that differs) unless the whole fence is current.
-- Locks: gate, then the job row; the clock is read in a later statement than the one that waits.
CREATE OR REPLACE FUNCTION fencepost._fence(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS fencepost.job LANGUAGE plpgsql AS $$
DECLARE
    v_job fencepost.job;
    v_part text;
BEGIN
    PERFORM fencepost._enter();
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF020', 'there is no such job', 'operation', 'stop; nothing may be published');
    END IF;
    v_part := CASE
        WHEN v_job.exec IS DISTINCT FROM 'running' THEN 'state'
        WHEN v_job.generation IS DISTINCT FROM p_generation THEN 'generation'
        WHEN v_job.attempt IS DISTINCT FROM p_attempt THEN 'attempt'
        WHEN v_job.owner IS DISTINCT FROM p_owner THEN 'owner'
        WHEN v_job.epoch IS DISTINCT FROM p_epoch OR fencepost._epoch(p_tenant) IS DISTINCT FROM p_epoch THEN 'epoch'
        WHEN v_job.lease_until <= clock_timestamp() THEN 'lease'
    END;
    IF v_part IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF020', 'the fence is no longer current: ' || v_part, v_part,
            'stop this attempt; what it computed may be staged for its successor, not published');
    END IF;
    RETURN v_job;
END $$;

-- Fences the caller's transaction: from here to its commit nobody supersedes this attempt, and the commit itself is
-- refused when the fence is no longer current by then. Take it outside savepoints, before any domain write.
CREATE OR REPLACE FUNCTION fencepost.fence(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'record or reconcile it first');
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO fencepost.publication (tenant, operation, class, generation, attempt, owner, epoch, lease_until)
    VALUES (p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch, v_job.lease_until);
END $$;

-- Checks the fence again and completes the job, in the transaction that holds the fence.
CREATE OR REPLACE FUNCTION fencepost.complete(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'record or reconcile it first');
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    UPDATE fencepost.job AS j SET exec = 'done', done_attempt = p_attempt, attempt = NULL, owner = NULL, lease_until = NULL,
        reason = NULL, detail = '', changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
END $$;

-- The check at commit, whatever the client did or forgot: still this attempt's, unexpired, same epoch, armed.
CREATE OR REPLACE FUNCTION fencepost._publication_guard()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_part text;
BEGIN
    PERFORM fencepost._enter();
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = NEW.tenant AND j.operation = NEW.operation AND j.class = NEW.class FOR NO KEY UPDATE;
    v_part := CASE
        WHEN NOT FOUND THEN 'operation'
        WHEN NOT (v_job.exec = 'running' AND v_job.attempt = NEW.attempt OR v_job.exec = 'done' AND v_job.done_attempt = NEW.attempt)
             THEN 'state'
        WHEN v_job.generation <> NEW.generation THEN 'generation'
        WHEN fencepost._epoch(NEW.tenant) <> NEW.epoch OR v_job.epoch <> NEW.epoch THEN 'epoch'
        WHEN v_job.open_effects > 0 THEN 'effect'
        WHEN greatest(NEW.lease_until, v_job.lease_until) <= clock_timestamp() THEN 'lease'
    END;
    IF v_part IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF020', 'the fence was lost before the commit: ' || v_part, v_part,
            'nothing was published; what was computed may be staged for the successor');
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.publication'::regclass AND tgname = 'publication_guard') THEN
        CREATE CONSTRAINT TRIGGER publication_guard AFTER INSERT ON fencepost.publication
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fencepost._publication_guard();
    END IF;
END $$;
