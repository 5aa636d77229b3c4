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
    v_suspect timestamptz;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_binding(p_binding);
    IF p_args IS NULL OR octet_length(p_args) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'args are null or larger than 1 MiB', 'args', 'store them elsewhere and pass a reference');
    ELSIF p_run_at NOT BETWEEN '2000-01-01 00:00+00' AND clock_timestamp() + interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'run_at is not within the next ten years', 'run_at', 'give an instant with a time zone');
    ELSIF p_priority NOT BETWEEN -1000000 AND 1000000 THEN
        -- What lies beyond is the agenda's own.
        PERFORM fencepost._refuse('ZF003', 'priority is not within a million', 'priority',
            'give a whole number from -1000000 to 1000000');
    END IF;
    v_epoch := fencepost._epoch(p_tenant);
    v_suspect := fencepost._suspect(p_tenant, p_operation, p_class, p_source_event);
    v_meaning := fencepost.meaning(p_tenant, p_operation, 'job:' || p_class, 1, p_binding);
    INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, source_event, priority, run_at,
        suspect, quiescent_at)
    VALUES (p_tenant, p_operation, p_class, p_args, v_meaning,
        fencepost.digest(p_tenant, p_operation, 'job:' || p_class, 1, v_epoch, p_binding), v_epoch, v_epoch, p_source_event,
        coalesce(p_priority, 0), coalesce(p_run_at, clock_timestamp()),
        v_suspect IS NOT NULL, v_suspect)
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

-- After a restore: whether a job that comes again may have begun effects in what was lost, and when their calls are over; null
-- when it cannot. Its event was accepted before the recovery (the time in its UUIDv7, a minute of clock difference allowed), or
-- a runner's journal holds a begin of it.
CREATE OR REPLACE FUNCTION fencepost._suspect(p_tenant text, p_operation text, p_class text, p_source_event uuid)
RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT i.recovered_at + fencepost._longest_call(p_class)
    FROM fencepost.installation AS i
    WHERE i.recovered_at IS NOT NULL
      AND (fencepost._accepted_at(p_source_event) <= i.recovered_at + interval '1 minute'
           OR EXISTS (SELECT FROM fencepost.lost_begin AS b
                      WHERE b.tenant = p_tenant AND b.operation = p_operation AND b.class = p_class))
$$;

-- When an event was accepted, by its UUIDv7; minus infinity for any other UUID, null for none.
CREATE OR REPLACE FUNCTION fencepost._accepted_at(p_event uuid)
RETURNS timestamptz LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT CASE WHEN substr(p_event::text, 15, 1) = '7'
           THEN to_timestamp(('x' || substr(replace(p_event::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0)
           ELSE '-infinity' END
$$;

-- How long a call of this class can be under way after it was begun; two days where nobody says.
CREATE OR REPLACE FUNCTION fencepost._longest_call(p_class text)
RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT c.max_effect_timeout + c.network_bound FROM fencepost.job_class AS c WHERE c.class = p_class), interval '2 days')
$$;
