-- Freezes a tenant, or (null) everybody: no effect begins until the thaw; what runs goes on, records and publishes.
CREATE OR REPLACE FUNCTION fencepost.freeze(p_tenant text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._set_frozen(p_tenant, true, p_version, p_actor, p_reason, p_evidence);
END $$;

-- Lets effects begin again; unknown ones stay unknown. A tenant's own freeze and everybody's are thawed each for itself.
CREATE OR REPLACE FUNCTION fencepost.thaw(p_tenant text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._set_frozen(p_tenant, false, p_version, p_actor, p_reason, p_evidence);
END $$;

CREATE OR REPLACE FUNCTION fencepost._set_frozen(
    p_tenant text, p_frozen boolean, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    IF p_tenant IS NULL THEN
        UPDATE fencepost.installation SET frozen = p_frozen;
    ELSE
        PERFORM fencepost._require_identity('tenant', p_tenant);
        INSERT INTO fencepost.tenant (tenant, epoch, frozen) VALUES (p_tenant, fencepost._epoch(p_tenant), p_frozen)
        ON CONFLICT (tenant) DO UPDATE SET frozen = p_frozen, changed_at = clock_timestamp();
        PERFORM fencepost._outdate();
    END IF;
    PERFORM fencepost._log_authority(CASE WHEN p_frozen THEN 'frozen' ELSE 'thawed' END, jsonb_build_object(
        'tenant', p_tenant, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;

-- Whether a tenant's begins are frozen, by its own freeze or by everybody's.
CREATE OR REPLACE FUNCTION fencepost._frozen(p_tenant text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT i.frozen OR coalesce((SELECT t.frozen FROM fencepost.tenant AS t WHERE t.tenant = p_tenant), false)
    FROM fencepost.installation AS i
$$;
