-- What this installation accepted before a rotation: its consumers set it aside until an authority admin releases it.

-- Whether an event is from here, of an epoch before the one that its tenant stands at now, and not released under that one.
-- Of other installations' events the epoch is data. `source` is what the relay writes into every event of this installation.
CREATE OR REPLACE FUNCTION fencepost._is_of_old_epoch(
    p_tenant text, p_consumer text, p_source text, p_epoch bigint, p_event_id uuid, p_meaning bytea, p_coordinates text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM fencepost.installation AS i WHERE p_source = 'urn:fencepost:' || i.id)
       AND p_epoch < fencepost._epoch(p_tenant)
       AND NOT EXISTS (SELECT FROM fencepost.dead_letter AS d
                       WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.event_id = p_event_id
                         AND d.arrived_meaning = p_meaning AND d.released_epoch = fencepost._epoch(p_tenant))
$$;

-- Lets a delivery be handled under the epoch that its tenant stands at now, although it was accepted under an older one: its
-- consumer handles it in its idle time, once. After another rotation it needs another release. What was reserved in a
-- transaction of the caller's own is let in when it is delivered again. Waits at most five seconds while it is being handled.
-- Locks: gate (ROW SHARE), so that the epoch stands still, then the letter.
CREATE OR REPLACE FUNCTION fencepost.release_dead_letter(p_id bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_letter fencepost.dead_letter;
    v_epoch bigint;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    v_letter := fencepost._lock_dead_letter(p_id);
    IF v_letter.reason <> 'old_epoch' THEN
        PERFORM fencepost._refuse('ZF003', 'it was not set aside for its epoch', 'epoch', 'retry it: fencepost deadletters retry');
    END IF;
    v_epoch := fencepost._epoch(v_letter.tenant);
    UPDATE fencepost.dead_letter AS d SET released_epoch = v_epoch, takes = 0,
        due_at = CASE WHEN d.coordinates ~ '^\["(kafka|rabbitmq)",' THEN clock_timestamp() END
    WHERE d.id = p_id;
    PERFORM fencepost._decide_dead_letter('release_dead_letter', v_letter, p_actor, p_reason, 'released under epoch ' || v_epoch);
END $$;
