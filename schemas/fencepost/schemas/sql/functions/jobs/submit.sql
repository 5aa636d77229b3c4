-- Schedules work for an operation in the caller's transaction. The same operation and class again is the same job;
-- with another meaning it is a conflict (ZF010). Takes no gate: accepted work waits for authority, it needs none.
CREATE OR REPLACE FUNCTION fencepost.submit(
    p_tenant text, p_operation text, p_class text, p_args bytea, p_binding text, p_source_event uuid DEFAULT NULL,
    p_run_at timestamptz DEFAULT NULL, p_priority integer DEFAULT 0)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_epoch bigint;
    v_meaning bytea;
    v_stored bytea;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_binding(p_binding);
    IF p_args IS NULL OR octet_length(p_args) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'args are null or larger than 1 MiB', 'args', 'store them elsewhere and pass a reference');
    ELSIF p_run_at IS NOT NULL AND p_run_at NOT BETWEEN '2000-01-01 00:00+00' AND clock_timestamp() + interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'run_at is not within the next ten years', 'run_at', 'give an instant with a time zone');
    END IF;
    v_epoch := fencepost._epoch(p_tenant);
    v_meaning := fencepost.meaning(p_tenant, p_operation, 'job:' || p_class, 1, p_binding);
    INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, source_event, priority, run_at)
    VALUES (p_tenant, p_operation, p_class, p_args, v_meaning,
        fencepost.digest(p_tenant, p_operation, 'job:' || p_class, 1, v_epoch, p_binding), v_epoch, v_epoch, p_source_event,
        coalesce(p_priority, 0), coalesce(p_run_at, clock_timestamp()))
    ON CONFLICT (tenant, operation, class) DO NOTHING;
    IF FOUND THEN
        RETURN true;
    END IF;
    SELECT j.meaning INTO v_stored FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    IF NOT FOUND THEN
        RAISE serialization_failure USING MESSAGE = 'the job was submitted after this snapshot', HINT = 'retry the transaction';
    ELSIF v_stored <> v_meaning THEN
        PERFORM fencepost._refuse('ZF010', 'the operation already has a job of this class with another meaning', 'operation',
            'a new request needs a new operation');
    END IF;
    RETURN false;
END $$;
