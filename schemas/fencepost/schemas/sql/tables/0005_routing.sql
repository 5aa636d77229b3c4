-- Routing and parking: which events each destination answers for, what a refusal does to its key, and operators' acts.

ALTER TABLE fencepost.destination
    ADD COLUMN on_refusal text NOT NULL DEFAULT 'block' CHECK (on_refusal IN ('block', 'pass'));
DROP FUNCTION IF EXISTS fencepost.register_destination(text, text, jsonb, boolean);

-- Invariant: a destination answers for the events whose type matches and whose number is in (since, until]; for ever, so
-- that a change of routes never drops what was accepted before it. What nobody answers for is the reserved `-`'s.
CREATE TABLE fencepost.route (
    destination text NOT NULL REFERENCES fencepost.destination,
    match       text NOT NULL,
    since       bigint NOT NULL CHECK (since >= 0),
    until       bigint CHECK (until > since),
    PRIMARY KEY (destination, match, since)
);
INSERT INTO fencepost.route (destination, match, since)
SELECT DISTINCT d.destination, r ->> 'match', t.hint
FROM fencepost.destination AS d
JOIN fencepost.tick AS t ON t.era = d.start_era AND t.n = d.start_tick
CROSS JOIN LATERAL jsonb_array_elements(d.routes) AS r;

-- Advanced whenever an operator changes parked events of a slot: its owner then looks again which keys wait.
ALTER TABLE fencepost.slot ADD COLUMN acts bigint NOT NULL DEFAULT 0;

CREATE INDEX parked_due ON fencepost.parked (destination, next_try_at) WHERE next_try_at IS NOT NULL;
CREATE UNIQUE INDEX parked_seq ON fencepost.parked (destination, seq);

ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination'));
