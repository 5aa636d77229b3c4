-- Reconciliation: whose an unknown effect is, how urgent it is, when that grows, and when its receipt is looked up again.

-- Invariant: escalate_after grows from step to step; the three arrays say what each step does (to null: it stays with whom it is).
ALTER TABLE fencepost.job_class
    ADD COLUMN assignee text NOT NULL DEFAULT 'operator',
    ADD COLUMN escalate_after interval[] NOT NULL DEFAULT '{1 hour,1 day}',
    ADD COLUMN escalate_severity text[] NOT NULL DEFAULT '{high,critical}',
    ADD COLUMN escalate_to text[] NOT NULL DEFAULT '{NULL,NULL}',
    ADD CONSTRAINT job_class_escalation_check CHECK (
        cardinality(escalate_after) = cardinality(escalate_severity) AND cardinality(escalate_after) = cardinality(escalate_to)
        AND escalate_severity <@ ARRAY['normal', 'high', 'critical']);

-- unknown_since: set exactly while the effect is unknown. escalations: how many steps of its class's policy it has taken.
ALTER TABLE fencepost.effect
    ADD COLUMN severity text NOT NULL DEFAULT 'normal' CHECK (severity IN ('normal', 'high', 'critical')),
    ADD COLUMN unknown_since timestamptz,
    ADD COLUMN escalations integer NOT NULL DEFAULT 0 CHECK (escalations >= 0);
UPDATE fencepost.effect SET unknown_since = changed_at WHERE state = 'unknown';
ALTER TABLE fencepost.effect ADD CONSTRAINT effect_unknown_since_check CHECK ((state = 'unknown') = (unknown_since IS NOT NULL));

-- Set where the event is about whose the effect is, not about what became of it.
ALTER TABLE fencepost.effect_event ADD COLUMN severity text, ADD COLUMN assignee text;

-- What was looked at and the receipt, so that the same decision can be told from another one under its id.
ALTER TABLE fencepost.decision ADD COLUMN version integer, ADD COLUMN receipt text;
ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'assign', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination',
    'retry_dead_letter', 'discard_dead_letter', 'read_dead_letter', 'inbox_retention', 'remove_schedule', 'pause', 'resume'));
CREATE INDEX decision_effect ON fencepost.decision (tenant, operation, subject) WHERE kind IN ('reconcile', 'assign');

-- Receipt look-ups of unknown effects: who asks now, or when it is asked again, and what the last answer was.
-- Invariant: one asker at a time; due_at is the end of its lease while it asks, else the time of the next question.
CREATE TABLE fencepost.lookup (
    tenant      text NOT NULL,
    operation   text NOT NULL,
    effect_key  text NOT NULL,
    version     integer NOT NULL,
    taken_by    uuid NOT NULL,
    taken_at    timestamptz NOT NULL,
    due_at      timestamptz NOT NULL,
    asks        integer NOT NULL DEFAULT 1 CHECK (asks >= 1),
    answer      text,
    answered_at timestamptz,
    PRIMARY KEY (tenant, operation, effect_key),
    FOREIGN KEY (tenant, operation, effect_key) REFERENCES fencepost.effect ON DELETE RESTRICT
) WITH (fillfactor = 70);
