-- Reclaims what expired leases left behind. Locked rows are skipped; what changed meanwhile is looked at again.
-- Crash here: [J] a worker that died is found by its expired lease; an effect it left pending becomes unknown.
CREATE OR REPLACE FUNCTION fencepost._reap(p_classes text[], p_limit integer, p_marks jsonb DEFAULT NULL)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_class text;
    v_keys record;
    v_job fencepost.job;
    v_count integer := 0;
BEGIN
    FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
        -- The agenda says where to look; a lease that was renewed is looked at again at its new end. Only a running job has a
        -- lease, and only one of the pointer's generation counts.
        WITH seen AS MATERIALIZED (
            SELECT a.ctid AS at, a.tenant, a.operation, a.generation, a.epoch, j.lease_until
            FROM fencepost.agenda AS a
            LEFT JOIN LATERAL (
                SELECT CASE WHEN k.generation = a.generation THEN k.lease_until END AS lease_until FROM fencepost.job AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class OFFSET 0) AS j ON true
            WHERE a.class = v_class AND a.priority = 2147483647 AND a.due <= v_now
              AND a.due >= coalesce((p_marks -> 'priorities' -> v_class ->> '2147483647')::timestamptz, '-infinity')
            ORDER BY a.due LIMIT 1000 FOR UPDATE OF a SKIP LOCKED
        ), over AS (
            DELETE FROM fencepost.agenda AS a USING seen AS s
            WHERE a.ctid = s.at AND (s.lease_until <= v_now) IS NOT TRUE
        ), renewed AS (
            INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
            SELECT v_class, 2147483647, greatest(s.lease_until, clock_timestamp()), s.tenant, s.operation, s.generation, s.epoch
            FROM seen AS s WHERE s.lease_until > v_now
        )
        SELECT array_agg(s.tenant) AS tenants, array_agg(s.operation) AS operations INTO v_keys
        FROM seen AS s WHERE s.lease_until <= v_now;
        FOR v_job IN
            SELECT j.* FROM (
                SELECT k.tenant, k.operation FROM unnest(v_keys.tenants, v_keys.operations) AS k (tenant, operation) ORDER BY 1, 2) AS u
            CROSS JOIN LATERAL (
                SELECT k.* FROM fencepost.job AS k
                WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = v_class AND k.lease_until <= v_now
                FOR NO KEY UPDATE SKIP LOCKED) AS j
            LIMIT p_limit - v_count
        LOOP
            PERFORM fencepost._leave(v_job, 'lease_expired', '', interval '0');
            v_count := v_count + 1;
        END LOOP;
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

-- Locks up to so many due jobs of one class, the most urgent first, and skips what others hold, what this claim has
-- already, and work under another epoch than its tenant's. Fetches what it takes and not the backlog. The pointers need no
-- lock: who holds the job may use them.
CREATE OR REPLACE FUNCTION fencepost._take(
    p_class text, p_priorities integer[], p_marks timestamptz[], p_now timestamptz, p_floor bigint, p_limit integer, p_but tid[])
RETURNS TABLE (at tid, job tid) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    SELECT d.at, j.at FROM unnest(p_priorities, p_marks) AS l (priority, mark)
    CROSS JOIN LATERAL (
        SELECT a.ctid AS at, a.tenant, a.operation, a.priority, a.generation FROM fencepost.agenda AS a
        WHERE a.class = p_class AND a.priority = l.priority AND a.due >= l.mark AND a.due <= p_now AND a.ctid <> ALL (p_but)
          AND a.epoch = greatest(p_floor, (SELECT t.claimable FROM fencepost.tenant AS t WHERE t.tenant = a.tenant))
        ORDER BY a.due) AS d
    CROSS JOIN LATERAL (
        SELECT k.ctid AS at FROM fencepost.job AS k
        WHERE k.tenant = d.tenant AND k.operation = d.operation AND k.class = p_class
          AND k.exec = 'queued' AND k.generation = d.generation AND k.priority = d.priority AND k.run_at <= p_now
          AND k.open_effects = 0
        FOR NO KEY UPDATE SKIP LOCKED) AS j
    LIMIT p_limit;
END $$;

-- Claims due work under finite leases, each with a new attempt and the next generation; an attempt counts here, so a
-- crash counts. Work with a pending or unknown effect is never claimed.
-- Several classes share one order; a class takes no more than its part of it while the others have work. `p_marks` is a
-- hint from `marks`, or null. Nothing is taken of what is paused, nor more of a class than its limits leave room for.
-- Invariant: here and in what is called from here a job is reached from what points to it, by key in a sub-select of its
-- own or by the place of a row that is locked; there is no other plan. A plain join would let a plan that was made when the
-- tables were empty read all jobs until they are analysed.
-- Locks: gate, `paused`, then job rows that nobody else holds, the most urgent first; no others. Of a class with a limit or a
-- fair one its own row before them, unless somebody holds it. Expired leases are reaped first.
CREATE OR REPLACE FUNCTION fencepost.claim(p_owner text, p_classes text[], p_limit integer, p_marks jsonb DEFAULT NULL)
RETURNS TABLE (tenant text, operation text, class text, generation bigint, attempt uuid, owner text, epoch bigint, mode text,
               attempts integer, max_attempts integer, args bytea, source_event uuid, lease_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_floor bigint;
    v_class record;
    v_took record;
    -- What is taken: pointers, and the locked jobs.
    v_at tid[] := '{}';
    v_jobs tid[] := '{}';
    v_classes text[] := '{}';
    v_share integer;
    -- Of classes with a limit and fair ones: who was served last, by class, and which jobs are taken.
    v_turns jsonb := '{}';
    v_turn_classes text[] := '{}';
    v_tenants text[] := '{}';
    v_operations text[] := '{}';
    -- The attempts of one claim share 106 random bits, and are numbered: asking for random bits a hundred times costs as much
    -- as the updates.
    v_attempts text := left(gen_random_uuid()::text, 32);
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
    IF EXISTS (SELECT FROM fencepost.lifecycle) THEN
        PERFORM fencepost._require_owner(p_classes, 'fencepost');
    END IF;
    LOCK TABLE fencepost.paused IN ROW SHARE MODE;
    p_classes := fencepost._enabled(p_classes);
    PERFORM fencepost._reap(p_classes, 100, p_marks);
    PERFORM fencepost._expire_effects(p_classes, 100);
    PERFORM fencepost._wake(p_classes, 100, p_marks);
    SELECT i.floor INTO STRICT v_floor FROM fencepost.installation AS i;
    v_now := clock_timestamp();
    -- First to each class its part of the common order, then what is left to whoever has more.
    FOR v_class IN
        WITH one AS MATERIALIZED (
            SELECT k.class, k.fair OR k.job_limit IS NOT NULL AS in_turn FROM fencepost.job_class AS k
            WHERE k.class = ANY (p_classes)
              AND NOT EXISTS (SELECT FROM fencepost.paused AS h WHERE h.scope = 'class' AND h.name = k.class)
              AND NOT EXISTS (SELECT FROM fencepost.paused AS h WHERE h.scope = 'queue' AND h.name = k.queue)),
        priority AS MATERIALIZED (SELECT o.class, l.priority, l.mark FROM one AS o, fencepost._priorities(o.class, p_marks) AS l),
        part AS MATERIALIZED (
            SELECT h.class, count(*) AS share FROM (
                SELECT l.class FROM priority AS l CROSS JOIN LATERAL (
                    SELECT a.due FROM fencepost.agenda AS a
                    WHERE a.class = l.class AND a.priority = l.priority AND a.due >= l.mark AND a.due <= v_now
                    ORDER BY a.due LIMIT p_limit) AS d
                WHERE (SELECT count(*) FROM one) > 1
                ORDER BY l.priority DESC, d.due LIMIT p_limit) AS h
            GROUP BY h.class)
        SELECT o.class, o.in_turn, s.step, CASE s.step WHEN 1 THEN p.share ELSE p_limit END AS share,
               ARRAY(SELECT l.priority FROM priority AS l WHERE l.class = o.class ORDER BY l.priority DESC) AS priorities,
               ARRAY(SELECT l.mark FROM priority AS l WHERE l.class = o.class ORDER BY l.priority DESC) AS marks
        FROM generate_series(1, 2) AS s (step) CROSS JOIN one AS o LEFT JOIN part AS p ON p.class = o.class
        WHERE s.step = 2 OR p.share IS NOT NULL ORDER BY s.step, o.class
    LOOP
        v_share := least(v_class.share, p_limit - cardinality(v_at));
        EXIT WHEN v_share = 0;
        IF v_class.in_turn THEN
            SELECT t.*, array_fill(v_class.class, ARRAY[cardinality(t.at)]) AS classes INTO v_took
            FROM fencepost._take_turn(v_class.class, v_class.priorities, v_class.marks, v_now, v_floor, v_share, v_at,
                ARRAY(SELECT u.tenant FROM unnest(v_tenants, v_turn_classes) AS u (tenant, class) WHERE u.class = v_class.class),
                v_turns -> v_class.class) AS t;
            v_turns := CASE WHEN v_took.served IS NULL THEN v_turns ELSE v_turns || jsonb_build_object(v_class.class, v_took.served) END;
            v_turn_classes := v_turn_classes || v_took.classes;
            v_tenants := v_tenants || v_took.tenants;
            v_operations := v_operations || v_took.operations;
        ELSE
            SELECT array_agg(t.at) AS at, array_agg(t.job) AS jobs, array_agg(v_class.class) AS classes INTO v_took
            FROM fencepost._take(v_class.class, v_class.priorities, v_class.marks, v_now, v_floor, v_share, v_at) AS t;
        END IF;
        v_at := v_at || v_took.at;
        v_jobs := v_jobs || v_took.jobs;
        v_classes := v_classes || v_took.classes;
    END LOOP;
    RETURN QUERY
    WITH claimed AS (
        UPDATE fencepost.job AS j SET
            exec = 'running',
            mode = CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 'finish' ELSE 'execute' END,
            generation = j.generation + 1, attempt = (v_attempts || to_hex(4096 + c.n))::uuid, owner = p_owner,
            lease_until = clock_timestamp() + k.lease,
            attempts = j.attempts + CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 0 ELSE 1 END,
            finishes = j.finishes + CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 1 ELSE 0 END,
            reason = NULL, detail = '', changed_at = clock_timestamp()
        FROM unnest(v_at, v_jobs, v_classes) WITH ORDINALITY AS c (at, job, class, n)
        JOIN fencepost.job_class AS k ON k.class = c.class
        WHERE j.ctid = c.job AND j.exec = 'queued' AND j.open_effects = 0
          AND j.epoch = greatest(v_floor, (SELECT t.claimable FROM fencepost.tenant AS t WHERE t.tenant = j.tenant))
        RETURNING j.*, c.at, k.max_attempts AS class_max_attempts, k.lease
    ), recorded AS (
        INSERT INTO fencepost.attempt (tenant, attempt, operation, class, generation, owner, epoch, mode)
        SELECT d.tenant, d.attempt, d.operation, d.class, d.generation, d.owner, d.epoch, d.mode FROM claimed AS d
    ), used AS (
        DELETE FROM fencepost.agenda AS a USING claimed AS d WHERE a.ctid = d.at
    ), leased AS (
        INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
        SELECT d.class, 2147483647, d.lease_until, d.tenant, d.operation, d.generation, d.epoch FROM claimed AS d
    )
    SELECT d.tenant, d.operation, d.class, d.generation, d.attempt, d.owner, d.epoch, d.mode, d.attempts, d.class_max_attempts,
           d.args, d.source_event, (extract(epoch FROM d.lease) * 1000)::bigint
    FROM claimed AS d ORDER BY d.priority DESC, d.run_at;
    IF v_turns <> '{}' THEN
        PERFORM fencepost._note_turn(t.class, t.served, t.tenants, t.operations) FROM (
            SELECT l.key AS class, l.value AS served,
                   ARRAY(SELECT u.tenant FROM unnest(v_tenants, v_turn_classes) AS u (tenant, class)
                         WHERE u.class = l.key) AS tenants,
                   ARRAY(SELECT u.operation FROM unnest(v_operations, v_turn_classes) AS u (operation, class)
                         WHERE u.class = l.key) AS operations
            FROM jsonb_each(v_turns) AS l) AS t;
    END IF;
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
        UPDATE fencepost.job AS j SET attempts = j.attempts - CASE j.mode WHEN 'execute' THEN 1 ELSE 0 END,
            finishes = j.finishes - CASE j.mode WHEN 'finish' THEN 1 ELSE 0 END
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
        RETURNING j.* INTO v_job;
    END IF;
    RETURN fencepost._leave(v_job, 'worker_stopped', '', interval '0');
END $$;
