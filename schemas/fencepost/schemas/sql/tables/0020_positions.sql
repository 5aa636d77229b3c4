-- Positions: how far consumers have read, as this database knows it, so that a restored one is given again what it lost.

-- recovered_epoch: the epoch of the last recovery, 0 before the first. Epochs are given once, so no two recoveries share it.
ALTER TABLE fencepost.installation ADD COLUMN recovered_epoch bigint NOT NULL DEFAULT 0;

-- Invariant: everything below next is committed in this database. Written after the work and before the broker is told, so that
-- a broker that knows more says that this database has lost it.
CREATE TABLE fencepost.consumer_position (
    consumer       text NOT NULL,
    cluster        text NOT NULL,
    consumer_group text NOT NULL,
    topic          text NOT NULL,
    topic_id       text NOT NULL,
    partition      integer NOT NULL,
    next           bigint NOT NULL CHECK (next >= 0),
    noted_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, cluster, consumer_group, topic, topic_id, partition)
) WITH (fillfactor = 50);

-- What each consumer had done when this database was recovered last; positions: so many partitions have one.
CREATE TABLE fencepost.consumer_recovery (
    consumer      text PRIMARY KEY,
    positions     bigint NOT NULL,
    noted_at      timestamptz,
    handled_until timestamptz,
    at            timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN fencepost.consumer_recovery.handled_until IS
  'The time of the youngest event that was handled, in the time that events carry.';
