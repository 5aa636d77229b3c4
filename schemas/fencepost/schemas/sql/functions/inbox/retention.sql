-- How long a consumer remembers. Nothing declared is for ever.

-- Notes how long the broker keeps what a consumer reads, in milliseconds by topic; -1 for ever.
CREATE OR REPLACE FUNCTION fencepost.note_topics(p_consumer text, p_topics jsonb)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    INSERT INTO fencepost.consumer_topic AS t (consumer, topic, retention_ms)
    SELECT p_consumer, n.key, n.value::bigint FROM jsonb_each_text(p_topics) AS n
    ON CONFLICT (consumer, topic) DO UPDATE SET retention_ms = excluded.retention_ms, noted_at = clock_timestamp();
END $$;

-- Topics that keep events for longer than a window, as far as that was noted in the last thirty days.
CREATE OR REPLACE FUNCTION fencepost._topics_beyond(p_consumer text, p_window interval)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT string_agg(t.topic || CASE t.retention_ms WHEN -1 THEN ' for ever'
                                 ELSE ' for ' || justify_interval(make_interval(secs => t.retention_ms / 1000.0)) END, ', ' ORDER BY t.topic)
    FROM fencepost.consumer_topic AS t
    WHERE t.consumer = p_consumer AND t.noted_at > clock_timestamp() - interval '30 days'
      AND (t.retention_ms = -1 OR t.retention_ms > extract(epoch FROM p_window) * 1000)
$$;

CREATE OR REPLACE FUNCTION fencepost._decide_retention(p_consumer text, p_actor text, p_reason text, p_verdict text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'inbox_retention', p_actor, p_reason, p_consumer, p_verdict)
$$;

-- Declares the replay window of a consumer; null remembers for ever from now on. What is forgotten already stays forgotten.
CREATE OR REPLACE FUNCTION fencepost.set_inbox_retention(p_consumer text, p_window interval, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_beyond text;
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    IF p_window NOT BETWEEN interval '1 second' AND interval '100 years' THEN
        PERFORM fencepost._refuse('ZF003', 'the replay window is not between a second and a hundred years', 'replay_window',
            'or none, to remember for ever');
    END IF;
    v_beyond := fencepost._topics_beyond(p_consumer, p_window);
    IF p_window IS NOT NULL AND v_beyond IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', 'the replay window is shorter than what the broker keeps: ' || v_beyond, 'replay_window',
            'give at least that, or shorten the retention of the topic and start the consumer again');
    END IF;
    INSERT INTO fencepost.consumer AS c (consumer, replay_window) VALUES (p_consumer, p_window)
    ON CONFLICT (consumer) DO UPDATE SET replay_window = p_window, changed_at = clock_timestamp();
    PERFORM fencepost._decide_retention(p_consumer, p_actor, p_reason, coalesce(p_window::text, 'for ever'));
END $$;

-- Declares that operations of a type are remembered for ever by a consumer, whatever its window, or no longer.
-- Locks: the consumer's row, so that the horizon stands still meanwhile and every later purge sees the type.
CREATE OR REPLACE FUNCTION fencepost.keep_type(p_consumer text, p_type text, p_forever boolean, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._require_identity('type', p_type);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    INSERT INTO fencepost.consumer AS c (consumer) VALUES (p_consumer)
    ON CONFLICT (consumer) DO UPDATE SET changed_at = clock_timestamp();
    IF p_forever THEN
        INSERT INTO fencepost.consumer_forever (consumer, type, horizon)
        SELECT c.consumer, p_type, c.horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM fencepost.consumer_forever AS f WHERE f.consumer = p_consumer AND f.type = p_type;
    END IF;
    PERFORM fencepost._decide_retention(p_consumer, p_actor, p_reason,
        p_type || CASE WHEN p_forever THEN ' for ever' ELSE ' like the others' END);
END $$;
