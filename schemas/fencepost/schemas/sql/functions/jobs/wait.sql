-- Ends the current attempt until a signal arrives or a time comes, whichever is first; the attempt is not charged. Returns
-- null when the job sleeps; else what it would have waited for, and the attempt goes on: the number of the first signal of
-- that name, or 0 when the time has come. `p_after` counts from the first wait for this signal, without one from now.
-- Locks: gate, then the job row.
CREATE OR REPLACE FUNCTION fencepost.wait(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_signal text, p_until timestamptz, p_after interval)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_wait fencepost.wait;
    v_until timestamptz;
    v_answer bigint;
BEGIN
    IF p_signal IS NOT NULL THEN
        PERFORM fencepost._require_identity('signal', p_signal);
    ELSIF p_until IS NULL AND p_after IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'neither a signal nor a time is waited for', 'signal', 'give signal, until or both');
    END IF;
    IF p_until IS NOT NULL AND (p_after IS NOT NULL
                                OR p_until NOT BETWEEN '2000-01-01 00:00+00' AND clock_timestamp() + interval '10 years') THEN
        PERFORM fencepost._refuse('ZF003', 'until is not one instant within the next ten years', 'until',
            'give an instant with a time zone, or a time from now');
    ELSIF p_after NOT BETWEEN interval '1 ms' AND interval '3653 days' THEN
        PERFORM fencepost._refuse('ZF003', 'until is not between a millisecond and ten years away', 'until', NULL);
    END IF;
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'record or reconcile it first');
    END IF;
    SELECT w.* INTO v_wait FROM fencepost.wait AS w
    WHERE w.tenant = p_tenant AND w.operation = p_operation AND w.class = p_class AND w.signal = coalesce(p_signal, '');
    v_until := coalesce(p_until, CASE WHEN p_signal IS NULL OR v_wait.began_at IS NULL THEN clock_timestamp()
                                 ELSE v_wait.began_at END + p_after);
    v_answer := v_wait.answer;
    IF v_answer IS NULL THEN
        SELECT min(s.n) INTO v_answer FROM fencepost.signal AS s
        WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class AND s.name = p_signal;
    END IF;
    IF v_answer IS NULL AND v_until <= clock_timestamp() THEN
        v_answer := 0;
    END IF;
    IF v_answer IS NOT NULL THEN
        IF p_signal IS NOT NULL AND v_wait.answer IS NULL THEN
            INSERT INTO fencepost.wait AS w (tenant, operation, class, signal, generation, answer)
            VALUES (p_tenant, p_operation, p_class, p_signal, v_job.generation, v_answer)
            ON CONFLICT (tenant, operation, class, signal) DO UPDATE SET answer = v_answer;
        END IF;
        RETURN v_answer;
    END IF;
    UPDATE fencepost.job AS j SET exec = 'waiting', generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
        attempts = greatest(j.attempts - CASE j.mode WHEN 'execute' THEN 1 ELSE 0 END, 0),
        finishes = greatest(j.finishes - CASE j.mode WHEN 'finish' THEN 1 ELSE 0 END, 0),
        reason = CASE WHEN p_signal IS NULL THEN 'waiting_for_time' ELSE 'waiting_for_signal' END,
        detail = coalesce(p_signal, ''), changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    INSERT INTO fencepost.wait AS w (tenant, operation, class, signal, generation, until)
    VALUES (p_tenant, p_operation, p_class, coalesce(p_signal, ''), v_job.generation + 1, v_until)
    ON CONFLICT (tenant, operation, class, signal) DO UPDATE SET generation = v_job.generation + 1, until = v_until;
    RETURN NULL;
END $$;

-- Whoever goes to sleep is looked at when its time comes and, where it waits for a signal, once right after its commit.
-- Invariant: a signal and a wait that do not see each other are looked at by whichever commits later: each leaves a pointer
-- of its own, and the look that uses it sees both. The pointers are in the agenda under the priority 2147483646.
CREATE OR REPLACE FUNCTION fencepost._wait_pointers()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
    SELECT NEW.class, 2147483646, greatest(d.due, clock_timestamp()), NEW.tenant, NEW.operation, NEW.generation, 0
    FROM (SELECT NEW.until WHERE NEW.until IS NOT NULL UNION ALL SELECT clock_timestamp() WHERE NEW.signal <> '') AS d (due);
    RETURN NULL;
END $$;
-- Locks: none where the trigger exists.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.wait'::regclass AND tgname = 'wait_pointers') THEN
        CREATE TRIGGER wait_pointers AFTER INSERT OR UPDATE ON fencepost.wait FOR EACH ROW
        WHEN (NEW.answer IS NULL) EXECUTE FUNCTION fencepost._wait_pointers();
    END IF;
END $$;

-- Queues waiting jobs whose signal has arrived or whose time has come, each at most once; called by every claim.
-- Invariant: what is pointed to is reached by key in a sub-select of its own, or by the place of a row that is locked; there
-- is no other plan.
-- Locks: agenda rows and job rows that nobody else holds; a job that somebody holds keeps its pointer for the next look.
CREATE OR REPLACE FUNCTION fencepost._wake(p_classes text[], p_limit integer, p_marks jsonb DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_class text;
    v_mark timestamptz;
    v_over record;
    v_held record;
BEGIN
    FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
        v_mark := coalesce((p_marks -> 'priorities' -> v_class ->> '2147483646')::timestamptz, '-infinity');
        CONTINUE WHEN NOT EXISTS (SELECT FROM fencepost.agenda AS a
                                  WHERE a.class = v_class AND a.priority = 2147483646 AND a.due <= v_now AND a.due >= v_mark);
        WITH seen AS MATERIALIZED (
            SELECT a.ctid AS at, a.tenant, a.operation, j.generation,
                   coalesce(j.waiting AND (w.until <= v_now OR s.arrived), false) AS over
            FROM fencepost.agenda AS a
            LEFT JOIN LATERAL (
                SELECT k.generation, k.exec = 'waiting' AS waiting FROM fencepost.job AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class OFFSET 0) AS j ON true
            LEFT JOIN LATERAL (
                SELECT k.signal, k.until FROM fencepost.wait AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class
                  AND k.generation = j.generation AND k.answer IS NULL LIMIT 1) AS w ON true
            LEFT JOIN LATERAL (
                SELECT true AS arrived FROM fencepost.signal AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class AND k.name = w.signal LIMIT 1) AS s ON true
            WHERE a.class = v_class AND a.priority = 2147483646 AND a.due <= v_now AND a.due >= v_mark
            ORDER BY a.due LIMIT p_limit FOR UPDATE OF a SKIP LOCKED
        ), used AS (
            DELETE FROM fencepost.agenda AS a USING seen AS s WHERE a.ctid = s.at AND NOT s.over
        )
        SELECT array_agg(s.at) AS at, array_agg(s.tenant) AS tenants, array_agg(s.operation) AS operations,
               array_agg(s.generation) AS generations INTO v_over
        FROM seen AS s WHERE s.over;
        CONTINUE WHEN v_over.at IS NULL;
        SELECT array_agg(h.at) AS at, array_agg(h.job) AS jobs INTO v_held FROM (
            SELECT u.at, j.at AS job
            FROM unnest(v_over.at, v_over.tenants, v_over.operations, v_over.generations) AS u (at, tenant, operation, generation)
            CROSS JOIN LATERAL (
                SELECT k.ctid AS at FROM fencepost.job AS k
                WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = v_class
                  AND k.exec = 'waiting' AND k.generation = u.generation
                FOR NO KEY UPDATE SKIP LOCKED) AS j) AS h;
        UPDATE fencepost.job AS j SET exec = 'queued', run_at = clock_timestamp(), reason = 'woken', changed_at = clock_timestamp()
        FROM unnest(v_held.jobs) AS h (job) WHERE j.ctid = h.job AND j.exec = 'waiting';
        DELETE FROM fencepost.agenda AS a WHERE a.ctid = ANY (v_held.at);
    END LOOP;
END $$;
