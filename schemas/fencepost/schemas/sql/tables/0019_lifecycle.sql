-- One owner of the lifecycle of each class: who claims, retries, reaps and completes its jobs. 'fencepost' where there is no row.
CREATE TABLE fencepost.lifecycle (
    class          text PRIMARY KEY,
    implementation text NOT NULL CHECK (implementation <> 'fencepost'),
    since          timestamptz NOT NULL DEFAULT clock_timestamp()
);

ALTER TABLE fencepost.authority_log DROP CONSTRAINT authority_log_kind_check;
ALTER TABLE fencepost.authority_log ADD CONSTRAINT authority_log_kind_check CHECK (kind IN (
    'created', 'armed', 'rotated', 'frozen', 'thawed', 'restricted', 'lifted', 'released', 'sealed', 'recovered', 'handed_over',
    'registered', 'granted', 'revoked'));

ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'assign', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination',
    'retry_dead_letter', 'discard_dead_letter', 'read_dead_letter', 'inbox_retention', 'remove_schedule', 'pause', 'resume',
    'take_over', 'give_back', 'release_dead_letter'));
