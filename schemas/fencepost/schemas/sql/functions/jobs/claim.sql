-- Reclaims what expired leases left behind. Locked rows are skipped; what changed meanwhile is looked at again.
-- Crash here: [J] a worker that died is found by its expired lease; an effect it left pending becomes unknown.
CREATE OR REPLACE FUNCTION fencepost._reap(p_classes text[], p_limit integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_key record;
    v_job fencepost.job;
    v_count integer := 0;
BEGIN
    FOR v_key IN
        SELECT j.tenant, j.operation, j.class FROM fencepost.job AS j
        WHERE j.exec = 'running' AND j.class = ANY (p_classes) AND j.lease_until <= (SELECT clock_timestamp())
        ORDER BY j.tenant, j.operation, j.class LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        SELECT j.* INTO v_job FROM fencepost.job AS j
        WHERE j.tenant = v_key.tenant AND j.operation = v_key.operation AND j.class = v_key.class;
        IF v_job.exec = 'running' AND v_job.lease_until <= clock_timestamp() THEN
            PERFORM fencepost._leave(v_job, 'lease_expired', '', interval '0');
            v_count := v_count + 1;
        END IF;
    END LOOP;
    RETURN v_count;
END $$;

-- Takes a running, locked job away from its attempt: unknown effects block it, a used-up budget poisons it, else it is
-- queued again. Advances the generation.
CREATE OR REPLACE FUNCTION fencepost._leave(p_job fencepost.job, p_reason text, p_detail text, p_delay interval)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_class fencepost.job_class;
    v_exec text;
    v_reason text := p_reason;
    v_finish boolean;
BEGIN
    SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = p_job.class;
    PERFORM fencepost._forget(e.tenant, e.operation, e.effect_key, p_reason)
    FROM fencepost.effect AS e
    WHERE e.tenant = p_job.tenant AND e.operation = p_job.operation AND e.class = p_job.class AND e.state = 'pending';
    v_finish := v_class.policy = 'strict' AND p_job.applied_effects > 0;
    IF p_job.open_effects > 0 THEN
        v_exec := 'blocked';
        v_reason := 'effect_unknown';
    ELSIF v_finish AND p_job.finishes >= v_class.max_finishes THEN
        v_exec := 'poison';
        v_reason := 'finishes_exhausted';
    ELSIF NOT v_finish AND p_job.attempts >= v_class.max_attempts THEN
        v_exec := 'poison';
        v_reason := 'attempts_exhausted';
    ELSE
        v_exec := 'queued';
    END IF;
    UPDATE fencepost.job AS j SET exec = v_exec, generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
        run_at = CASE v_exec WHEN 'queued' THEN clock_timestamp() + p_delay ELSE j.run_at END,
        reason = v_reason,
        detail = CASE WHEN v_reason = p_reason THEN p_detail ELSE left(concat_ws(': ', p_reason, nullif(p_detail, '')), 500) END,
        changed_at = clock_timestamp()
    WHERE j.tenant = p_job.tenant AND j.operation = p_job.operation AND j.class = p_job.class;
    RETURN v_exec;
END $$;

-- A cursor over the due jobs of one class, the most urgent first, which locks each job as it is fetched and skips what
-- others hold. Work under another epoch than its tenant's is passed over.
-- The index job_queued has this order: a fetch costs what it fetches, not the backlog. The settings keep it so for plans
-- that are older than the backlog.
CREATE OR REPLACE FUNCTION fencepost._due(p_class text, p_floor bigint, p_limit integer)
RETURNS refcursor LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_due refcursor;
BEGIN
    OPEN v_due NO SCROLL FOR
        SELECT j.tenant, j.operation, j.priority, j.run_at FROM fencepost.job AS j
        WHERE j.exec = 'queued' AND j.class = p_class AND j.run_at <= v_now AND j.open_effects = 0
          AND j.epoch = greatest(p_floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = j.tenant))
        ORDER BY j.priority DESC, j.run_at LIMIT p_limit FOR NO KEY UPDATE OF j SKIP LOCKED;
    RETURN v_due;
END $$;

-- Claims due work under finite leases, each with a new attempt and the next generation; an attempt counts here, so a
-- crash counts. Work with a pending or unknown effect is never claimed.
-- Locks: gate, then what is claimed and at most one more job of each class: the classes' queues are merged by their heads.
CREATE OR REPLACE FUNCTION fencepost.claim(p_owner text, p_classes text[], p_limit integer)
RETURNS TABLE (tenant text, operation text, class text, generation bigint, attempt uuid, owner text, epoch bigint, mode text,
               attempts integer, max_attempts integer, args bytea, source_event uuid, lease_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_floor bigint;
    v_class text;
    v_due refcursor;
    v_job record;
    v_best integer;
    v_queues refcursor[] := '{}';
    v_classes text[] := '{}';
    -- The head of each queue; its run_at is null once the queue is empty.
    v_tenants text[] := '{}';
    v_operations text[] := '{}';
    v_priorities integer[] := '{}';
    v_run_ats timestamptz[] := '{}';
    -- What is taken.
    v_taken_tenants text[] := '{}';
    v_taken_operations text[] := '{}';
    v_taken_classes text[] := '{}';
BEGIN
    PERFORM fencepost._require_identity('owner', p_owner);
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF p_classes IS NULL OR EXISTS (
        SELECT FROM unnest(p_classes) AS u (class)
        WHERE NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = u.class)) THEN
        PERFORM fencepost._refuse('ZF051', 'a class is not registered', 'class', 'register it before it is claimed');
    END IF;
    PERFORM fencepost._enter();
    PERFORM fencepost._reap(p_classes, 100);
    PERFORM fencepost._expire_effects(p_classes, 100);
    SELECT i.floor INTO STRICT v_floor FROM fencepost.installation AS i;
    FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
        v_due := fencepost._due(v_class, v_floor, p_limit);
        FETCH v_due INTO v_job;
        IF FOUND THEN
            v_queues := array_append(v_queues, v_due);
            v_classes := array_append(v_classes, v_class);
            v_tenants := array_append(v_tenants, v_job.tenant);
            v_operations := array_append(v_operations, v_job.operation);
            v_priorities := array_append(v_priorities, v_job.priority);
            v_run_ats := array_append(v_run_ats, v_job.run_at);
        ELSE
            CLOSE v_due;
        END IF;
    END LOOP;
    WHILE cardinality(v_taken_tenants) < p_limit LOOP
        SELECT h.n INTO v_best FROM unnest(v_priorities, v_run_ats) WITH ORDINALITY AS h (priority, run_at, n)
        WHERE h.run_at IS NOT NULL ORDER BY h.priority DESC, h.run_at, h.n LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_taken_tenants := array_append(v_taken_tenants, v_tenants[v_best]);
        v_taken_operations := array_append(v_taken_operations, v_operations[v_best]);
        v_taken_classes := array_append(v_taken_classes, v_classes[v_best]);
        EXIT WHEN cardinality(v_taken_tenants) = p_limit;
        v_due := v_queues[v_best];
        FETCH v_due INTO v_job;
        v_tenants[v_best] := v_job.tenant;
        v_operations[v_best] := v_job.operation;
        v_priorities[v_best] := v_job.priority;
        v_run_ats[v_best] := v_job.run_at;
    END LOOP;
    FOREACH v_due IN ARRAY v_queues LOOP
        CLOSE v_due;
    END LOOP;
    RETURN QUERY
    WITH claimed AS (
        UPDATE fencepost.job AS j SET
            exec = 'running',
            mode = CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 'finish' ELSE 'execute' END,
            generation = j.generation + 1, attempt = gen_random_uuid(), owner = p_owner,
            lease_until = clock_timestamp() + k.lease,
            attempts = j.attempts + CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 0 ELSE 1 END,
            finishes = j.finishes + CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 1 ELSE 0 END,
            reason = NULL, detail = '', changed_at = clock_timestamp()
        FROM unnest(v_taken_tenants, v_taken_operations, v_taken_classes) AS c (tenant, operation, class)
        JOIN fencepost.job_class AS k ON k.class = c.class
        WHERE j.tenant = c.tenant AND j.operation = c.operation AND j.class = c.class
          AND j.exec = 'queued' AND j.open_effects = 0 AND j.epoch = fencepost._epoch(j.tenant)
        RETURNING j.*, k.max_attempts AS class_max_attempts, k.lease
    ), recorded AS (
        INSERT INTO fencepost.attempt (tenant, attempt, operation, class, generation, owner, epoch, mode)
        SELECT d.tenant, d.attempt, d.operation, d.class, d.generation, d.owner, d.epoch, d.mode FROM claimed AS d
    )
    SELECT d.tenant, d.operation, d.class, d.generation, d.attempt, d.owner, d.epoch, d.mode, d.attempts, d.class_max_attempts,
           d.args, d.source_event, (extract(epoch FROM d.lease) * 1000)::bigint
    FROM claimed AS d ORDER BY d.priority DESC, d.run_at;
END $$;

-- Extends the lease of the current attempt by the class's lease, counted from now; nobody else's. Waits half a second at
-- most for the job row (55P03): one long publish must not keep a worker from renewing its other leases.
CREATE OR REPLACE FUNCTION fencepost.renew(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
BEGIN
    PERFORM fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    UPDATE fencepost.job AS j SET lease_until = greatest(j.lease_until, clock_timestamp() + c.lease)
    FROM fencepost.job_class AS c
    WHERE c.class = p_class AND j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
END $$;

-- Ends the current attempt without a result: queued again with a delay, blocked by an open effect, or poison.
-- Returns what the job became.
CREATE OR REPLACE FUNCTION fencepost.fail(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_reason text, p_detail text, p_delay interval DEFAULT NULL, p_final boolean DEFAULT false)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_class fencepost.job_class;
    v_delay interval := p_delay;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = p_class;
    IF v_delay IS NULL THEN
        -- Doubles with every attempt up to the cap, then spread over the upper half.
        v_delay := least(v_class.backoff_max, v_class.backoff_base * power(2, least(v_job.attempts - 1, 30)))
                   * (0.5 + random() / 2);
    END IF;
    IF p_final AND v_job.open_effects = 0 THEN
        UPDATE fencepost.job AS j SET exec = 'poison', generation = j.generation + 1, attempt = NULL, owner = NULL,
            lease_until = NULL, reason = p_reason, detail = left(coalesce(p_detail, ''), 500), changed_at = clock_timestamp()
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
        RETURN 'poison';
    END IF;
    RETURN fencepost._leave(v_job, p_reason, left(coalesce(p_detail, ''), 500), v_delay);
END $$;

-- Gives the claim back untouched, as a worker that stops does; the attempt is not charged.
CREATE OR REPLACE FUNCTION fencepost.release(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects = 0 THEN
        UPDATE fencepost.job AS j SET attempts = greatest(j.attempts - CASE j.mode WHEN 'execute' THEN 1 ELSE 0 END, 0),
            finishes = greatest(j.finishes - CASE j.mode WHEN 'finish' THEN 1 ELSE 0 END, 0)
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
        RETURNING j.* INTO v_job;
    END IF;
    RETURN fencepost._leave(v_job, 'worker_stopped', '', interval '0');
END $$;
