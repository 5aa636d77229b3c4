-- Seals the database for a planned move: nobody uses its authority any more, and it arms itself once it runs elsewhere (another
-- system or timeline) or was restarted. The caller has told the witness first.
-- Locks: gate EXCLUSIVE (waits at most five seconds for those who use authority now).
CREATE OR REPLACE FUNCTION fencepost.seal(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp(),
        sealed_start = pg_postmaster_start_time();
    DELETE FROM fencepost.ticket;
    PERFORM fencepost._outdate();
    PERFORM fencepost._log_authority('sealed', jsonb_build_object(
        'seq', p_next_seq, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;
