-- Puts every restriction (kind:subject) that is not there yet into force, under the gate; returns those. Work of a suspended
-- tenant or a disabled class is taken away from its attempts and not claimed; a revoked login is refused
-- every use of authority, every signal and every act of an operator; what it enqueues, submits or reserves is accepted, until
-- PostgreSQL takes its role away.
CREATE OR REPLACE FUNCTION fencepost._restrict(p_restrictions text[], p_reason text)
RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_one text;
    v_kind text;
    v_subject text;
    v_made text[] := '{}';
BEGIN
    FOREACH v_one IN ARRAY coalesce(p_restrictions, '{}') LOOP
        v_kind := split_part(v_one, ':', 1);
        v_subject := substr(v_one, length(v_kind) + 2);
        IF v_kind NOT IN ('tenant', 'class', 'principal') THEN
            PERFORM fencepost._refuse('ZF003', 'a restriction is not of a tenant, a class or a principal', 'kind', NULL);
        END IF;
        PERFORM fencepost._require_identity('subject', v_subject);
        INSERT INTO fencepost.restriction (kind, subject, reason) VALUES (v_kind, v_subject, p_reason) ON CONFLICT DO NOTHING;
        CONTINUE WHEN NOT FOUND;
        v_made := v_made || v_one;
        IF v_kind = 'tenant' THEN
            INSERT INTO fencepost.tenant (tenant, epoch, suspended) VALUES (v_subject, fencepost._epoch(v_subject), true)
            ON CONFLICT (tenant) DO UPDATE SET suspended = true, changed_at = clock_timestamp();
            PERFORM fencepost._hold_running(v_subject, NULL, 'suspended');
        ELSIF v_kind = 'class' THEN
            PERFORM fencepost._hold_running(NULL, v_subject, 'disabled');
        END IF;
    END LOOP;
    RETURN v_made;
END $$;

-- Lifts a restriction; what it took away stays held until it is released. Returns false when there is none.
CREATE OR REPLACE FUNCTION fencepost.lift(p_kind text, p_subject text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    DELETE FROM fencepost.restriction AS r WHERE r.kind = p_kind AND r.subject = p_subject;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE fencepost.tenant SET suspended = false, changed_at = clock_timestamp() WHERE p_kind = 'tenant' AND tenant = p_subject;
    PERFORM fencepost._outdate();
    PERFORM fencepost._log_authority('lifted', jsonb_build_object(
        'restriction', p_kind || ':' || p_subject, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    RETURN true;
END $$;

-- Of these classes, those that are not disabled.
CREATE OR REPLACE FUNCTION fencepost._enabled(p_classes text[])
RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(u.class), '{}') FROM unnest(p_classes) AS u (class)
    WHERE NOT EXISTS (SELECT FROM fencepost.restriction AS r WHERE r.kind = 'class' AND r.subject = u.class)
$$;
