"""Guards taken out of the database before a run, to see that the run is able to find what they prevent."""

from __future__ import annotations

from typing import LiteralString

# As queues do that only ask whether a job runs: not whose attempt it is, and not again at the commit.
NO_FENCE: LiteralString = """
DROP TRIGGER publication_guard ON fencepost.publication;
CREATE OR REPLACE FUNCTION fencepost._fence(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS fencepost.job LANGUAGE plpgsql AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF v_job.exec <> 'running' THEN
        PERFORM fencepost._refuse('ZF020', 'the job does not run', 'state', NULL);
    END IF;
    RETURN v_job;
END $$"""
# Whatever did not answer counts as not having happened, and is sent again.
SILENCE_IS_FAILURE: LiteralString = """
ALTER FUNCTION fencepost.record_effect(text, text, text, uuid, text, text, bytea, text) RENAME TO _record_effect;
CREATE FUNCTION fencepost.record_effect(
    p_tenant text, p_operation text, p_effect_key text, p_effect_attempt uuid, p_outcome text, p_receipt text,
    p_result bytea, p_reason text)
RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT fencepost._record_effect(p_tenant, p_operation, p_effect_key, p_effect_attempt,
        CASE p_outcome WHEN 'unknown' THEN 'failed_before_dispatch' ELSE p_outcome END, p_receipt, p_result, p_reason)
$$"""
MUTANTS: dict[str, LiteralString] = {"no-fence": NO_FENCE, "silence-is-failure": SILENCE_IS_FAILURE}
