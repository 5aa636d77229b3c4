-- Registers a principal, or changes the login whose sessions alone may act as it (null: of any login that may ask).
CREATE OR REPLACE FUNCTION fencepost.register_principal(
    p_principal text, p_login text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._change_principal(p_principal, p_version, p_actor, p_reason);
    IF p_login IS NOT NULL THEN
        PERFORM fencepost._require_identity('login', p_login);
    END IF;
    INSERT INTO fencepost.principal AS p (principal, login) VALUES (p_principal, p_login)
    ON CONFLICT (principal) DO UPDATE SET login = p_login, since = clock_timestamp();
    PERFORM fencepost._log_authority('registered', jsonb_build_object(
        'principal', p_principal, 'login', p_login, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;

-- Lets a principal act for a tenant on work of a class (*: every one), as long as the tenant's epoch stands. Granted again, it
-- stands under the epoch of now. Returns the newest epoch, which is the last one that it covers.
CREATE OR REPLACE FUNCTION fencepost.grant_principal(
    p_principal text, p_tenant text, p_class text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_epoch bigint;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._change_principal(p_principal, p_version, p_actor, p_reason);
    IF NOT EXISTS (SELECT FROM fencepost.principal AS p WHERE p.principal = p_principal) THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such principal', 'principal', 'register it first: fencepost authority principal add');
    END IF;
    SELECT i.epoch_counter INTO STRICT v_epoch FROM fencepost.installation AS i;
    INSERT INTO fencepost.principal_grant (principal, tenant, class, epoch) VALUES (p_principal, p_tenant, p_class, v_epoch)
    ON CONFLICT (principal, tenant, class) DO UPDATE SET epoch = v_epoch, since = clock_timestamp();
    PERFORM fencepost._log_authority('granted', jsonb_build_object('principal', p_principal, 'tenant', p_tenant, 'class', p_class,
        'epoch', v_epoch, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    RETURN v_epoch;
END $$;

-- Takes grants back: those of this tenant and class, null for whatever it is (* is the grant for every one, and only that).
-- Returns how many there were. No restore gives them back: it puts every tenant under an epoch that no grant covers.
CREATE OR REPLACE FUNCTION fencepost.revoke_principal(
    p_principal text, p_tenant text, p_class text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM fencepost._change_principal(p_principal, p_version, p_actor, p_reason);
    DELETE FROM fencepost.principal_grant AS g
    WHERE g.principal = p_principal AND g.tenant = coalesce(p_tenant, g.tenant) AND g.class = coalesce(p_class, g.class);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        PERFORM fencepost._log_authority('revoked', jsonb_build_object('principal', p_principal, 'tenant', p_tenant, 'class', p_class,
            'grants', v_count, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    END IF;
    RETURN v_count;
END $$;

CREATE OR REPLACE FUNCTION fencepost._change_principal(p_principal text, p_version bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fencepost._require_identity('principal', p_principal);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    PERFORM fencepost._outdate();
END $$;
