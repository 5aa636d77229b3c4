-- Changes of authority: rotation, freeze, restriction, release, seal and recovery, in one hash-chained history.

-- frozen: nobody begins an effect. recovered_at: what was accepted before it may have been worked on in what a restore lost.
ALTER TABLE fencepost.installation
    ADD COLUMN frozen boolean NOT NULL DEFAULT false,
    ADD COLUMN recovered_at timestamptz;

-- claimable: the epoch that work must stand at to be claimed; none does while the tenant is suspended.
ALTER TABLE fencepost.tenant
    ADD COLUMN suspended boolean NOT NULL DEFAULT false,
    ADD COLUMN claimable bigint GENERATED ALWAYS AS (CASE WHEN suspended THEN 9223372036854775807 ELSE epoch END) STORED;

-- held: taken away by a rotation or a recovery. suspect: a restore made it doubtful which effects it has begun, so it begins
-- none that was not reconciled; quiescent_at: no call that was lost by the restore can be under way after it.
ALTER TABLE fencepost.job
    ADD COLUMN suspect boolean NOT NULL DEFAULT false,
    ADD COLUMN quiescent_at timestamptz,
    DROP CONSTRAINT job_exec_check;
ALTER TABLE fencepost.job
    ADD CONSTRAINT job_exec_check CHECK (exec IN ('queued', 'running', 'waiting', 'done', 'cancelled', 'poison', 'blocked', 'held')),
    ADD CONSTRAINT job_suspect_check CHECK (NOT suspect OR quiescent_at IS NOT NULL);

-- An effect that a suspect job's operator settled, and of which this database knows nothing, has no attempt and no request.
ALTER TABLE fencepost.effect
    ALTER COLUMN begun_by DROP NOT NULL,
    ALTER COLUMN request_digest DROP NOT NULL;

-- Begins of jobs that a restore lost, out of the runners' journals: submitted again, such a job is suspect.
CREATE TABLE fencepost.lost_begin (
    tenant         text NOT NULL,
    operation      text NOT NULL,
    class          text NOT NULL,
    effect_key     text NOT NULL,
    effect_attempt uuid NOT NULL,
    found_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class, effect_key, effect_attempt)
);

CREATE TABLE fencepost.restriction (
    kind    text NOT NULL CHECK (kind IN ('tenant', 'class', 'principal')),
    subject text NOT NULL,
    reason  text NOT NULL,
    since   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (kind, subject)
);

-- Who acts without a job. login: whose sessions alone may act as it; null: of any login that may ask.
CREATE TABLE fencepost.principal (
    principal text PRIMARY KEY,
    login     text,
    since     timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- tenant, class: * is every one. epoch: the newest that anybody had when it was granted; a tenant that got a newer one since,
-- by rotation or recovery, is not covered any more.
CREATE TABLE fencepost.principal_grant (
    principal text NOT NULL REFERENCES fencepost.principal,
    tenant    text NOT NULL,
    class     text NOT NULL,
    epoch     bigint NOT NULL,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (principal, tenant, class)
);

-- sealed_start: when the server was started on which the seal was written; a seal is broken by arming elsewhere or on purpose.
ALTER TABLE fencepost.tip ADD COLUMN sealed_start timestamptz;

ALTER TABLE fencepost.authority_log DROP CONSTRAINT authority_log_kind_check;
ALTER TABLE fencepost.authority_log ADD CONSTRAINT authority_log_kind_check CHECK (kind IN (
    'created', 'armed', 'rotated', 'frozen', 'thawed', 'restricted', 'lifted', 'released', 'sealed', 'recovered'));
