-- Recycling: how long events and their identities are kept, and what is gone.

-- retention: how long published events stay in the outbox, for backfill. replay_window: how long an accepted operation is remembered.
ALTER TABLE fencepost.installation
    ADD COLUMN retention interval NOT NULL DEFAULT '7 days',
    ADD COLUMN replay_window interval NOT NULL DEFAULT '7 days',
    ADD CONSTRAINT installation_retention_check CHECK (retention >= '0' AND replay_window >= retention);

-- Invariant: an event of a child that was closed has a number up to closed_seq and was recorded before closed_at, or its
-- number is above closed_seq (its transaction chose the child before it was closed and wrote after).
CREATE TABLE fencepost.outbox_child (
    child      smallint PRIMARY KEY CHECK (child BETWEEN 0 AND 2),
    opened_at  timestamptz NOT NULL,
    closed_at  timestamptz NOT NULL,
    closed_seq bigint NOT NULL
);
INSERT INTO fencepost.outbox_child (child, opened_at, closed_at, closed_seq)
VALUES (0, '-infinity', '-infinity', 0), (1, '-infinity', '-infinity', 0), (2, '-infinity', '-infinity', 0);

-- Up to where events are gone: numbers above `seq`, events recorded after `recorded_at` and pages that start at `tick` or
-- later are complete.
CREATE TABLE fencepost.recycled (
    singleton   boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    seq         bigint NOT NULL DEFAULT 0,
    recorded_at timestamptz NOT NULL DEFAULT '-infinity',
    era         integer NOT NULL DEFAULT 1,
    tick        bigint NOT NULL DEFAULT 0
);
INSERT INTO fencepost.recycled DEFAULT VALUES;

CREATE INDEX event_key_recorded_at ON fencepost.event_key (recorded_at);
CREATE INDEX parked_event_id ON fencepost.parked (event_id);
