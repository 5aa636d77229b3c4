-- Gives a dead letter up, on an operator's word, which is kept for ever with both what and where it was.
CREATE OR REPLACE FUNCTION fencepost.discard_dead_letter(p_id bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    v_letter := fencepost._lock_dead_letter(p_id);
    DELETE FROM fencepost.dead_letter AS d WHERE d.id = p_id;
    PERFORM fencepost._decide_dead_letter('discard_dead_letter', v_letter, p_actor, p_reason, 'discarded');
END $$;

-- The content of a dead letter; who read it, and why, is kept.
CREATE OR REPLACE FUNCTION fencepost.read_dead_letter(
    p_id bigint, p_actor text, p_reason text, OUT headers jsonb, OUT payload bytea)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._require_login();
    SELECT d.* INTO v_letter FROM fencepost.dead_letter AS d WHERE d.id = p_id;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such dead letter', 'id', 'see: fencepost deadletters list');
    END IF;
    PERFORM fencepost._decide_dead_letter('read_dead_letter', v_letter, p_actor, p_reason, 'read');
    headers := v_letter.headers;
    payload := v_letter.payload;
END $$;
