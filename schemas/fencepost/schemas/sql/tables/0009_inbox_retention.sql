-- Inbox: how long each consumer remembers, up to where it has forgotten, and dead letters that an operator gives back.

-- replay_window null: nothing is forgotten, which is also what a consumer without a row does.
-- Invariant: the horizon never moves back, and nothing whose event is as young as it was ever forgotten.
CREATE TABLE fencepost.consumer (
    consumer      text PRIMARY KEY,
    replay_window interval CHECK (replay_window > '0'),
    horizon       timestamptz NOT NULL DEFAULT '-infinity',
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN fencepost.consumer.horizon IS
  'In the time that events carry: the only one that every copy of an event has in common, whenever and wherever it arrives.';

-- Types of irreversible operations: their reservations are never purged. horizon: up to where they may have been, before that.
CREATE TABLE fencepost.consumer_forever (
    consumer text NOT NULL REFERENCES fencepost.consumer,
    type     text NOT NULL,
    horizon  timestamptz NOT NULL,
    PRIMARY KEY (consumer, type)
);

-- How long the broker keeps what this consumer reads, as the broker said at the last start; -1 for ever.
CREATE TABLE fencepost.consumer_topic (
    consumer     text NOT NULL,
    topic        text NOT NULL,
    retention_ms bigint NOT NULL CHECK (retention_ms >= -1),
    noted_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, topic)
);

CREATE INDEX reservation_event_time ON fencepost.reservation (consumer, event_time);
CREATE INDEX unreserved_delivery_first_at ON fencepost.unreserved_delivery (consumer, first_at);

ALTER TABLE fencepost.dead_letter DROP CONSTRAINT dead_letter_reason_check;
ALTER TABLE fencepost.dead_letter ADD CONSTRAINT dead_letter_reason_check CHECK (reason IN (
    'conflict', 'delivery_changed', 'undecodable', 'unknown_type', 'newer_version', 'handler_failed', 'before_horizon', 'old_epoch'));
-- last_at: of several letters of one delivery, the youngest says what it is now. due_at: when the consumer takes it again.
ALTER TABLE fencepost.dead_letter
    ADD COLUMN last_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ADD COLUMN due_at timestamptz,
    ADD COLUMN takes integer NOT NULL DEFAULT 0,
    ADD COLUMN unhandled boolean NOT NULL DEFAULT false,
    ADD COLUMN released_epoch bigint;
COMMENT ON COLUMN fencepost.dead_letter.unhandled IS
  'An operator has said that this event was not handled before its history was purged: it may be handled, although it is old.';
COMMENT ON COLUMN fencepost.dead_letter.released_epoch IS
  'The epoch that its tenant stood at when an authority admin released it: it may be handled under that one, although it is of an older.';
CREATE INDEX dead_letter_due ON fencepost.dead_letter (consumer, due_at) WHERE due_at IS NOT NULL;

ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination',
    'retry_dead_letter', 'discard_dead_letter', 'read_dead_letter', 'inbox_retention'));
