-- Giving a dead letter back to its consumer: an operator marks it due, the consumer takes it and handles it through its
-- inbox, and the transaction that handles it is the one that settles it.

CREATE OR REPLACE FUNCTION fencepost._decide_dead_letter(
    p_kind text, p_letter fencepost.dead_letter, p_actor text, p_reason text, p_verdict text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict, evidence_kind, evidence_ref)
    VALUES (gen_random_uuid(), p_kind, p_actor, p_reason, p_letter.tenant, p_letter.operation, 'dead letter ' || p_letter.id, p_verdict,
            p_letter.reason, format('%s %s sha256:%s', p_letter.consumer, p_letter.coordinates, encode(p_letter.content, 'hex')))
$$;

-- The letter, locked; refused when there is none.
CREATE OR REPLACE FUNCTION fencepost._lock_dead_letter(p_id bigint)
RETURNS fencepost.dead_letter LANGUAGE plpgsql AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    SELECT d.* INTO v_letter FROM fencepost.dead_letter AS d WHERE d.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such dead letter', 'id',
            'it was handled or discarded meanwhile; see: fencepost deadletters list');
    END IF;
    RETURN v_letter;
END $$;

-- Marks a dead letter due: its consumer handles it in its idle time. What is older than the purge horizon is refused, unless
-- the operator says that it was not handled before. Waits at most five seconds while the letter is being handled.
CREATE OR REPLACE FUNCTION fencepost.retry_dead_letter(p_id bigint, p_unhandled boolean, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    v_letter := fencepost._lock_dead_letter(p_id);
    IF v_letter.reason = 'old_epoch' THEN
        PERFORM fencepost._refuse('ZF003', 'it was accepted under an older epoch of this installation', 'epoch',
            'an authority admin may release it: fencepost deadletters release; or discard it');
    ELSIF v_letter.coordinates !~ '^\["(kafka|rabbitmq)",' THEN
        PERFORM fencepost._refuse('ZF003', 'it was reserved by a caller with a transaction of its own', 'coordinates',
            'have its sender deliver it again, or discard it');
    ELSIF coalesce(p_unhandled, false) <> (v_letter.reason = 'before_horizon') THEN
        PERFORM fencepost._refuse('ZF003',
            CASE WHEN p_unhandled THEN 'only what is older than the purge horizon can be declared unhandled'
                 ELSE 'it is older than the purge horizon: nothing here can tell whether it was handled' END, 'unhandled',
            CASE WHEN p_unhandled THEN 'retry it without that' ELSE 'retry it with --unhandled if you know that it was not, or discard it' END);
    END IF;
    UPDATE fencepost.dead_letter AS d SET due_at = clock_timestamp(), takes = 0, unhandled = d.unhandled OR coalesce(p_unhandled, false)
    WHERE d.id = p_id;
    PERFORM fencepost._decide_dead_letter('retry_dead_letter', v_letter, p_actor, p_reason,
        CASE WHEN p_unhandled THEN 'due, declared unhandled' ELSE 'due' END);
END $$;

-- Takes one due letter of a consumer, none on a disarmed database: what was due when a copy was made is not due in the copy.
-- Committed at once, before anything is handled, so that one which brings its process down is met again only after `p_lease`,
-- and after `p_takes` times by nobody until an operator says so again.
CREATE OR REPLACE FUNCTION fencepost.take_dead_letter(
    p_consumer text, p_lease interval, p_takes integer, OUT id bigint, OUT coordinates text, OUT headers jsonb, OUT payload bytea)
RETURNS SETOF record LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOCK TABLE fencepost.gate IN ROW SHARE MODE;
    IF NOT fencepost.armed() THEN
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE fencepost.dead_letter AS d
    SET takes = d.takes + 1, due_at = CASE WHEN d.takes + 1 < p_takes THEN clock_timestamp() + p_lease END
    WHERE d.id = (SELECT f.id FROM fencepost.dead_letter AS f
                  WHERE f.consumer = p_consumer AND f.due_at <= now()
                  ORDER BY f.due_at LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING d.id, d.coordinates, d.headers, d.payload;
END $$;

-- Settles a letter that was taken, in the transaction that handles it and before its handler runs. Reserved or a duplicate: it
-- goes. Set aside again: of the letters of this delivery the youngest stays, and is not due.
-- Locks: the letter, so that an operator's act on it waits for the handler, and the other way round.
CREATE OR REPLACE FUNCTION fencepost.settle_dead_letter(p_id bigint, p_consumer text, p_gone boolean)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_letter fencepost.dead_letter;
    v_youngest bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true);
    v_letter := fencepost._lock_dead_letter(p_id);
    IF v_letter.consumer IS DISTINCT FROM p_consumer THEN
        PERFORM fencepost._refuse('ZF003', 'the dead letter is another consumer''s', 'consumer', NULL);
    END IF;
    IF NOT p_gone THEN
        SELECT d.id INTO v_youngest FROM fencepost.dead_letter AS d
        WHERE d.consumer = v_letter.consumer AND d.coordinates = v_letter.coordinates AND d.content = v_letter.content
        ORDER BY d.last_at DESC, d.id DESC LIMIT 1;
        UPDATE fencepost.dead_letter AS d
        SET due_at = NULL, unhandled = d.unhandled OR v_letter.unhandled,
            released_epoch = greatest(d.released_epoch, v_letter.released_epoch),
            attempts = d.attempts + CASE WHEN d.id = p_id THEN 0 ELSE v_letter.attempts END
        WHERE d.id = v_youngest;
    END IF;
    DELETE FROM fencepost.dead_letter AS d WHERE d.id = p_id AND d.id IS DISTINCT FROM v_youngest;
END $$;
