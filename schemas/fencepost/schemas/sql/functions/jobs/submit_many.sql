-- Schedules many jobs of one class in the caller's transaction, each as `submit` would; true for each that is new. One that
-- is refused refuses all of them: its number, from 1, is in the message.
-- Locks: none but the rows inserted, by tenant and operation.
CREATE OR REPLACE FUNCTION fencepost.submit_many(
    p_class text, p_tenants text[], p_operations text[], p_args bytea[], p_bindings text[], p_source_events uuid[],
    p_run_at timestamptz[], p_priorities integer[])
RETURNS boolean[] LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_count constant integer := cardinality(p_tenants);
    v_now constant timestamptz := clock_timestamp();
    v_new boolean[];
    v_other record;
    v_item bigint;
    v_recovered constant boolean := (SELECT i.recovered_at IS NOT NULL FROM fencepost.installation AS i);
BEGIN
    IF v_count IS NULL OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'not between 1 and 1000 jobs', 'jobs', 'submit them in several batches');
    ELSIF (cardinality(p_operations), cardinality(p_args), cardinality(p_bindings), cardinality(p_source_events),
           cardinality(p_run_at), cardinality(p_priorities)) IS DISTINCT FROM
          (v_count, v_count, v_count, v_count, v_count, v_count) THEN
        PERFORM fencepost._refuse('ZF003', 'the parts of the jobs are not equally many', 'jobs', 'give every part of every job');
    END IF;
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('tenant', u.tenant) FROM (SELECT DISTINCT t.tenant FROM unnest(p_tenants) AS t (tenant)) AS u;
    PERFORM fencepost._require_identity('operation', u.operation), fencepost._require_binding(u.binding)
    FROM unnest(p_operations, p_bindings) AS u (operation, binding);
    SELECT min(u.item) INTO v_item FROM unnest(p_args) WITH ORDINALITY AS u (args, item)
    WHERE u.args IS NULL OR octet_length(u.args) > 1048576;
    IF v_item IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('args of job %s are null or larger than 1 MiB', v_item), 'args',
            'store them elsewhere and pass a reference');
    END IF;
    SELECT min(u.item) INTO v_item FROM unnest(p_run_at) WITH ORDINALITY AS u (run_at, item)
    WHERE u.run_at NOT BETWEEN '2000-01-01 00:00+00' AND v_now + interval '10 years';
    IF v_item IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('run_at of job %s is not within the next ten years', v_item), 'run_at',
            'give an instant with a time zone');
    END IF;
    SELECT min(u.item) INTO v_item FROM unnest(p_priorities) WITH ORDINALITY AS u (priority, item)
    WHERE u.priority NOT BETWEEN -1000000 AND 1000000;
    IF v_item IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('priority of job %s is not within a million', v_item), 'priority',
            'give a whole number from -1000000 to 1000000');
    END IF;
    WITH epoch AS MATERIALIZED (
        SELECT t.tenant, fencepost._epoch(t.tenant) AS epoch FROM (SELECT DISTINCT u.tenant FROM unnest(p_tenants) AS u (tenant)) AS t
    ), new AS (
        INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, source_event, priority, run_at,
            suspect, quiescent_at)
        SELECT u.tenant, u.operation, p_class, u.args, fencepost.meaning(u.tenant, u.operation, 'job:' || p_class, 1, u.binding),
               fencepost.digest(u.tenant, u.operation, 'job:' || p_class, 1, e.epoch, u.binding), e.epoch, e.epoch, u.source_event,
               coalesce(u.priority, 0), coalesce(u.run_at, v_now), q.quiescent_at IS NOT NULL, q.quiescent_at
        FROM unnest(p_tenants, p_operations, p_args, p_bindings, p_source_events, p_run_at, p_priorities) WITH ORDINALITY
             AS u (tenant, operation, args, binding, source_event, run_at, priority, item)
        JOIN epoch AS e ON e.tenant = u.tenant
        CROSS JOIN LATERAL (
            SELECT CASE WHEN v_recovered THEN fencepost._suspect(u.tenant, u.operation, p_class, u.source_event) END AS quiescent_at) AS q
        ORDER BY u.tenant, u.operation, u.item
        ON CONFLICT (tenant, operation, class) DO NOTHING
        RETURNING job.tenant, job.operation
    )
    -- Of two alike in one call the first is the new one.
    SELECT array_agg(n.tenant IS NOT NULL AND u.rank = 1 ORDER BY u.item) INTO v_new
    FROM (SELECT w.*, row_number() OVER (PARTITION BY w.tenant, w.operation ORDER BY w.item) AS rank
          FROM unnest(p_tenants, p_operations) WITH ORDINALITY AS w (tenant, operation, item)) AS u
    LEFT JOIN new AS n ON n.tenant = u.tenant AND n.operation = u.operation;
    IF NOT false = ANY (v_new) THEN
        RETURN v_new;
    END IF;
    SELECT u.item, j.meaning INTO v_other
    FROM unnest(p_tenants, p_operations, p_bindings, v_new) WITH ORDINALITY AS u (tenant, operation, binding, new, item)
    LEFT JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = p_class
    WHERE NOT u.new
      AND j.meaning IS DISTINCT FROM fencepost.meaning(u.tenant, u.operation, 'job:' || p_class, 1, u.binding)
    ORDER BY u.item LIMIT 1;
    IF NOT FOUND THEN
        RETURN v_new;
    ELSIF v_other.meaning IS NULL THEN
        RAISE serialization_failure USING MESSAGE = 'a job was submitted after this snapshot', HINT = 'retry the transaction';
    END IF;
    PERFORM fencepost._refuse('ZF010',
        format('the operation of job %s already has a job of this class with another meaning', v_other.item), 'operation',
        'a new request needs a new operation');
END $$;
