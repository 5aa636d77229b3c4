-- Events that a later one of their key overtook on its way to a broker: where order broke, or may have, it is said.

-- Invariant: written in the commit that records the later one's confirm; kept for the replay window.
CREATE TABLE fencepost.overtaken (
    destination  text NOT NULL REFERENCES fencepost.destination,
    seq          bigint NOT NULL,
    overtaken_by bigint NOT NULL CHECK (overtaken_by <> seq),
    tenant       text NOT NULL,
    ordering_key text NOT NULL,
    operation    text NOT NULL,
    type         text NOT NULL,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (destination, seq)
);
CREATE INDEX overtaken_at ON fencepost.overtaken (at);
