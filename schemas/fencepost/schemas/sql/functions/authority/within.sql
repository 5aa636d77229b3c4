-- Refuses unless this principal may act for the tenant, on work of this class (null: of none in particular), and keeps that true
-- until the caller's transaction ends: whatever changes authority waits for it. Writes nothing. Returns the tenant's epoch.
-- Take it outside savepoints, before any domain write: rolling back to an earlier one gives the lock back.
-- Locks: gate.
CREATE OR REPLACE FUNCTION fencepost.within(p_principal text, p_tenant text, p_class text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_epoch bigint;
    v_granted bigint;
    v_restricted text;
BEGIN
    PERFORM fencepost._require_identity('principal', p_principal);
    PERFORM fencepost._require_identity('tenant', p_tenant);
    IF p_class IS NOT NULL THEN
        PERFORM fencepost._require_identity('class', p_class);
    END IF;
    PERFORM fencepost._enter();
    SELECT r.kind INTO v_restricted FROM fencepost.restriction AS r
    WHERE r.kind = 'principal' AND r.subject = p_principal
       OR r.kind = 'tenant' AND r.subject = p_tenant
       OR r.kind = 'class' AND r.subject = p_class
    ORDER BY r.kind LIMIT 1;
    IF FOUND THEN
        PERFORM fencepost._refuse('ZF061', 'the ' || v_restricted || ' is restricted', v_restricted,
            'an authority admin may lift it: fencepost authority lift');
    ELSIF NOT EXISTS (SELECT FROM fencepost.principal AS p
                      WHERE p.principal = p_principal AND coalesce(p.login, session_user) = session_user) THEN
        PERFORM fencepost._refuse('ZF061', 'it is no principal, or not one of this login', 'principal',
            'an authority admin registers it: fencepost authority principal add');
    END IF;
    v_epoch := fencepost._epoch(p_tenant);
    SELECT max(g.epoch) INTO v_granted FROM fencepost.principal_grant AS g
    WHERE g.principal = p_principal AND g.tenant IN (p_tenant, '*') AND g.class IN (p_class, '*');
    IF v_granted IS NULL THEN
        PERFORM fencepost._refuse('ZF061', 'this was not granted to the principal', 'grant',
            'an authority admin may grant it: fencepost authority principal grant');
    ELSIF v_granted < v_epoch THEN
        PERFORM fencepost._refuse('ZF020', 'it was granted under an older epoch of the tenant', 'epoch',
            'an authority admin may grant it anew: fencepost authority principal grant');
    END IF;
    RETURN v_epoch;
END $$;
