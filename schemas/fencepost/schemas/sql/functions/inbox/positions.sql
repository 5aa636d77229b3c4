-- Notes how far a consumer has read partitions, after the work below is committed and before the broker is told; positions only
-- grow. Without any it says whether they could be noted. Refused while the database is not armed, and with ZF020 when it was
-- recovered since `p_recovered` was read: whoever asks then knows of work that this database may have lost.
-- A crash may forget what this wrote, never the work below it: the log is written in order.
-- Locks: gate (ROW SHARE), then the positions.
CREATE OR REPLACE FUNCTION fencepost.note_positions(
    p_consumer text, p_cluster text, p_group text, p_recovered bigint,
    p_topics text[], p_topic_ids text[], p_partitions integer[], p_nexts bigint[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._enter();
    IF p_recovered IS DISTINCT FROM (SELECT i.recovered_epoch FROM fencepost.installation AS i) THEN
        PERFORM fencepost._refuse('ZF020', 'the database was restored and recovered meanwhile', 'epoch',
            'read the positions again, and go on from there');
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO fencepost.consumer_position AS c (consumer, cluster, consumer_group, topic, topic_id, partition, next)
    SELECT p_consumer, p_cluster, p_group, n.topic, n.topic_id, n.partition, n.next
    FROM unnest(p_topics, p_topic_ids, p_partitions, p_nexts) AS n (topic, topic_id, partition, next)
    ORDER BY n.topic, n.topic_id, n.partition
    ON CONFLICT (consumer, cluster, consumer_group, topic, topic_id, partition)
    DO UPDATE SET next = excluded.next, noted_at = clock_timestamp() WHERE c.next < excluded.next;
END $$;

-- What every consumer had done at a recovery: how many positions it has, and the youngest event it has handled.
CREATE OR REPLACE FUNCTION fencepost._note_consumers()
RETURNS void LANGUAGE sql AS $$
    DELETE FROM fencepost.consumer_recovery;
    WITH RECURSIVE handled AS (
        -- From consumer to consumer along the index.
        (SELECT r.consumer FROM fencepost.reservation AS r ORDER BY r.consumer LIMIT 1)
        UNION ALL
        SELECT (SELECT r.consumer FROM fencepost.reservation AS r WHERE r.consumer > h.consumer ORDER BY r.consumer LIMIT 1)
        FROM handled AS h WHERE h.consumer IS NOT NULL
    ), known AS (
        SELECT h.consumer FROM handled AS h WHERE h.consumer IS NOT NULL
        UNION SELECT p.consumer FROM fencepost.consumer_position AS p
        UNION SELECT c.consumer FROM fencepost.consumer AS c
    )
    INSERT INTO fencepost.consumer_recovery (consumer, positions, noted_at, handled_until)
    SELECT k.consumer, p.count, p.noted_at, (SELECT max(r.event_time) FROM fencepost.reservation AS r WHERE r.consumer = k.consumer)
    FROM known AS k
    CROSS JOIN LATERAL (SELECT count(*) AS count, max(p.noted_at) AS noted_at FROM fencepost.consumer_position AS p
                        WHERE p.consumer = k.consumer) AS p
$$;
