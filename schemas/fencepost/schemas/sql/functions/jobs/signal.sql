-- Tells a job something, in the caller's transaction: inserts only, without gate and without a lock of the job, so it can run
-- inside any transaction. Returns `recorded`; `known` when this key has told the same before, of which only the key is looked
-- at first; `too_late` when the job is done, and nothing is kept. Another name or payload under the key is a conflict (ZF010).
-- Of an archived job nothing of that is looked at any more: it is always too late.
-- Locks: two calls with one key wait for each other.
CREATE OR REPLACE FUNCTION fencepost.signal(
    p_tenant text, p_operation text, p_class text, p_name text, p_payload bytea, p_key text DEFAULT NULL, p_actor text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_exec text;
    v_same boolean;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('name', p_name);
    IF p_key IS NOT NULL THEN
        PERFORM fencepost._require_identity('key', p_key);
    END IF;
    IF p_actor IS NOT NULL THEN
        PERFORM fencepost._require_identity('actor', p_actor);
    END IF;
    IF p_payload IS NULL OR octet_length(p_payload) > 65536 THEN
        PERFORM fencepost._refuse('ZF003', 'payload is null or larger than 64 KiB', 'payload', 'store it elsewhere and send a reference');
    END IF;
    PERFORM fencepost._require_login();
    SELECT CASE WHEN j.archived_at IS NULL THEN j.exec ELSE 'done' END INTO v_exec FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'submit it first, in this transaction or before it');
    END IF;
    IF v_exec <> 'done' THEN
        IF (SELECT count(*) FROM (SELECT FROM fencepost.signal AS s
                                  WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class LIMIT 1000) AS c) = 1000 THEN
            PERFORM fencepost._refuse('ZF003', 'the job has been told a thousand times', 'name', 'count elsewhere and signal once');
        END IF;
        INSERT INTO fencepost.signal (tenant, operation, class, name, key, payload, actor)
        VALUES (p_tenant, p_operation, p_class, p_name, p_key, p_payload, p_actor) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            -- Invariant: whatever the job is at this moment, a claim looks at it after this commit; see _wait_pointers.
            INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
            VALUES (p_class, 2147483646, clock_timestamp(), p_tenant, p_operation, 0, 0);
            PERFORM fencepost._ring_jobs();
            RETURN 'recorded';
        END IF;
    END IF;
    SELECT s.name = p_name AND s.payload = p_payload INTO v_same FROM fencepost.signal AS s
    WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class AND s.key = p_key;
    IF v_same THEN
        RETURN 'known';
    ELSIF NOT v_same THEN
        PERFORM fencepost._refuse('ZF010', 'this key has told the job something else', 'key', 'a new signal needs a new key');
    ELSIF v_exec <> 'done' THEN
        RAISE serialization_failure USING MESSAGE = 'the signal was recorded after this snapshot', HINT = 'retry the transaction';
    END IF;
    RETURN 'too_late';
END $$;

-- Everything that a job was told, in the order in which it was written.
CREATE OR REPLACE FUNCTION fencepost.signals(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (n bigint, name text, key text, payload bytea, actor text, login text, at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.n, s.name, s.key, s.payload, s.actor, s.login, s.at FROM fencepost.signal AS s
    WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class ORDER BY s.n
$$;
