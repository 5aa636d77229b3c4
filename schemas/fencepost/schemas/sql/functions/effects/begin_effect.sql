-- Records the intent before the dispatch. outcome begun: dispatch now, and only within timeout_ms counted from before
-- this call. outcome recorded: the effect happened already, here is its receipt; do not dispatch.
-- Extends the lease past the dispatch deadline, so that nobody takes over while the call may still be under way.
-- Crash here: [E] after this commit and before the outcome: the effect stays pending, then unknown; never sent again
-- without evidence.
CREATE OR REPLACE FUNCTION fencepost.begin_effect(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_effect_key text, p_kind text, p_effect_attempt uuid, p_request_digest bytea, p_timeout interval,
    OUT outcome text, OUT timeout_ms bigint, OUT lease_ms bigint, OUT receipt text, OUT result bytea, OUT version integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_class fencepost.job_class;
    v_effect fencepost.effect;
    v_now timestamptz;
BEGIN
    PERFORM fencepost._require_identity('effect_key', p_effect_key);
    IF p_effect_attempt IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'effect_attempt is null', 'effect_attempt', 'make a new UUID for every begin');
    ELSIF p_request_digest IS NULL OR octet_length(p_request_digest) <> 32 THEN
        PERFORM fencepost._refuse('ZF003', 'request_digest is not 32 bytes', 'request_digest', 'sha256 of the request');
    ELSIF p_kind IS NULL OR p_kind NOT IN ('keyed', 'lookup', 'opaque') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is not keyed, lookup or opaque', 'kind', NULL);
    END IF;
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = p_class;
    IF p_timeout IS NULL OR p_timeout <= interval '0' OR p_timeout > v_class.max_effect_timeout THEN
        PERFORM fencepost._refuse('ZF003', 'timeout is not within the class maximum', 'timeout', 'raise max_effect_timeout of the class');
    END IF;

    SELECT e.* INTO v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF FOUND THEN
        IF v_effect.request_digest <> p_request_digest THEN
            PERFORM fencepost._refuse('ZF010', 'the effect key was already used for another request', 'effect_key',
                'a different request needs a different effect key');
        ELSIF v_effect.state IN ('success', 'resolved_applied') THEN
            outcome := 'recorded';
            receipt := v_effect.receipt;
            result := v_effect.result;
            version := v_effect.version;
            RETURN;
        ELSIF v_effect.state IN ('pending', 'unknown') THEN
            PERFORM fencepost._refuse('ZF030', 'the effect is ' || v_effect.state, 'effect_key', 'record its outcome or reconcile it');
        ELSIF v_effect.class <> p_class THEN
            PERFORM fencepost._refuse('ZF010', 'the effect key belongs to another class of this operation', 'class',
                'use an effect key of its own');
        ELSIF v_effect.kind = 'keyed' AND p_kind <> 'keyed' AND v_effect.quiescent_at > clock_timestamp() THEN
            -- Invariant: what was resolved early because the same provider key would be used again, uses it.
            PERFORM fencepost._refuse('ZF034', 'the earlier call may still be under way, and only its key makes another one safe',
                'kind', 'begin it as keyed, or after its quiescence');
        END IF;
    END IF;
    IF v_job.mode <> 'execute' THEN
        PERFORM fencepost._refuse('ZF032', 'this claim may finish with the recorded receipt, not begin', 'mode',
            'publish with the receipt; declare the class resumable if it has several effects');
    ELSIF fencepost._frozen(p_tenant) THEN
        PERFORM fencepost._refuse('ZF021', 'effects of this tenant are frozen', 'tenant', 'wait for the thaw');
    ELSIF v_class.policy = 'strict' AND EXISTS (
        SELECT FROM fencepost.effect AS e
        WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.class = p_class AND e.effect_key <> p_effect_key) THEN
        PERFORM fencepost._refuse('ZF031', 'a job of a strict class has one effect', 'effect_key', 'declare the class resumable');
    ELSIF v_job.suspect AND v_effect.state IS NULL THEN
        PERFORM fencepost._refuse('ZF030', 'a restore made it doubtful whether this effect was begun before', 'suspect',
            'look at the provider, then say so: fencepost effects reconcile');
    END IF;

    v_now := clock_timestamp();
    INSERT INTO fencepost.effect AS e (tenant, operation, effect_key, class, kind, state, effect_attempt, begun_by,
        request_digest, dispatch_deadline, quiescent_at)
    VALUES (p_tenant, p_operation, p_effect_key, p_class, p_kind, 'pending', p_effect_attempt, p_attempt, p_request_digest,
        v_now + p_timeout, v_now + p_timeout + v_class.network_bound)
    ON CONFLICT (tenant, operation, effect_key) DO UPDATE SET state = 'pending', kind = p_kind, effect_attempt = p_effect_attempt,
        begun_by = p_attempt, dispatch_deadline = v_now + p_timeout,
        request_digest = p_request_digest,
        -- An earlier call under the same provider key may outlast this one.
        quiescent_at = greatest(v_now + p_timeout + v_class.network_bound, CASE e.kind WHEN 'keyed' THEN e.quiescent_at END),
        decision_id = NULL, receipt = NULL, result = NULL, reason = NULL, version = e.version + 1, begins = e.begins + 1,
        begun_at = v_now, changed_at = v_now
    -- Invariant: a job of another class may have begun this key since it was looked at; only these may begin again.
    WHERE e.state IN ('failed_before_dispatch', 'resolved_not_applied') AND e.class = p_class
          AND coalesce(e.request_digest, p_request_digest) = p_request_digest
    RETURNING e.version INTO version;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF030', 'the effect was begun by a job of another class meanwhile', 'effect_key',
            'its receipt can be read once it is recorded');
    END IF;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, v_effect.state, NULL);
    UPDATE fencepost.job AS j SET open_effects = j.open_effects + 1,
        lease_until = greatest(j.lease_until, v_now + p_timeout + v_class.lease)
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
    RETURNING (extract(epoch FROM j.lease_until - v_now) * 1000)::bigint INTO lease_ms;
    outcome := 'begun';
    timeout_ms := (extract(epoch FROM p_timeout) * 1000)::bigint;
END $$;

-- Appends the state an effect has just reached to its history.
CREATE OR REPLACE FUNCTION fencepost._effect_event(p_tenant text, p_operation text, p_effect_key text, p_was text, p_reason text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
    SELECT e.tenant, e.operation, e.effect_key, e.effect_attempt, p_was, e.state, e.receipt, p_reason, e.version
    FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key
$$;
