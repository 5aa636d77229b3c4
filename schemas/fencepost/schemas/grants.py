"""Who may do what: the privilege matrix of the database contract, and nothing outside it.

Role names carry the installation (roles belong to the whole cluster). They cannot log in: grant them to your logins.
"""

from __future__ import annotations

from typing import Any, LiteralString, cast

from psycopg import Connection, sql

ROLES: tuple[LiteralString, ...] = (
    "migrator",
    "producer",
    "relay",
    "consumer",
    "executor",
    "projector",
    "reconciler",
    "authority_admin",
    "armer",
    "maintenance",
    "reader",
)

FUNCTIONS: dict[str, tuple[LiteralString, ...]] = {
    "enqueue": ("producer", "consumer", "executor"),
    "submit": ("producer", "consumer", "executor"),
    "submit_many": ("producer", "consumer", "executor"),
    "signal": ("producer", "consumer", "executor", "reconciler"),
    "result": ("producer", "consumer", "executor", "reconciler"),
    "progress": ("producer", "consumer", "executor", "reconciler", "reader"),
    "meaning": ("producer", "relay", "consumer", "executor", "reader"),
    "digest": ("producer", "relay", "consumer", "executor", "reader"),
    "armed": (
        "producer",
        "relay",
        "consumer",
        "executor",
        "reconciler",
        "authority_admin",
        "armer",
        "maintenance",
        "reader",
    ),
    "contract": (
        "producer",
        "relay",
        "consumer",
        "executor",
        "reconciler",
        "authority_admin",
        "armer",
        "maintenance",
        "reader",
    ),
    "tip": ("reconciler", "authority_admin", "armer", "reader"),
    "arm": ("authority_admin", "armer"),
    "beat": ("armer",),
    "lease_duty": ("armer", "maintenance"),
    "begin_change": ("authority_admin",),
    "disarm": ("authority_admin",),
    "rotate": ("authority_admin",),
    "freeze": ("authority_admin",),
    "thaw": ("authority_admin",),
    "lift": ("authority_admin",),
    "within": ("producer", "consumer", "executor"),
    "register_principal": ("authority_admin",),
    "grant_principal": ("authority_admin",),
    "revoke_principal": ("authority_admin",),
    "release_held": ("authority_admin",),
    "seal": ("authority_admin",),
    "recover": ("authority_admin",),
    "note_lost_begin": ("authority_admin",),
    "hand_over": ("authority_admin",),
    "holds": ("reconciler", "authority_admin", "reader"),
    "verify_authority": ("authority_admin", "reader"),
    "tick": ("relay",),
    "late_rows": ("relay",),
    "register_destination": ("relay",),
    "lease_slots": ("relay",),
    "release_slots": ("relay",),
    "ack": ("relay",),
    "doze": ("relay",),
    "rung": ("relay",),
    "retried": ("relay",),
    "retry_parked": ("reconciler",),
    "skip_parked": ("reconciler",),
    "remove_destination": ("reconciler",),
    "recycle_outbox": ("maintenance",),
    "recycle_acks": ("maintenance",),
    "purge_ticks": ("maintenance",),
    "purge_event_keys": ("maintenance",),
    "set_retention": ("authority_admin",),
    "reserve": ("consumer",),
    "reserve_many": ("consumer",),
    "settle_batch": ("consumer",),
    "dead_letter": ("consumer",),
    "take_dead_letter": ("consumer",),
    "settle_dead_letter": ("consumer",),
    "note_topics": ("consumer",),
    "note_positions": ("consumer",),
    "retry_dead_letter": ("reconciler",),
    "release_dead_letter": ("authority_admin",),
    "discard_dead_letter": ("reconciler",),
    "read_dead_letter": ("reconciler",),
    "set_inbox_retention": ("authority_admin",),
    "keep_type": ("authority_admin",),
    "advance_horizon": ("maintenance",),
    "purge_reservations": ("maintenance",),
    "purge_deliveries": ("maintenance",),
    "set_job_retention": ("authority_admin",),
    "set_archive_retention": ("authority_admin",),
    "archive_jobs": ("maintenance",),
    "drop_archives": ("maintenance",),
    "finished_jobs": ("reconciler", "maintenance"),
    "register_class": ("executor",),
    "claim": ("executor",),
    "marks": ("executor",),
    "own": ("executor",),
    "take_over": ("executor",),
    "give_back": ("executor",),
    "doze_jobs": ("executor",),
    "rung_jobs": ("executor",),
    "renew": ("executor",),
    "fence": ("executor",),
    "complete": ("executor",),
    "complete_many": ("executor",),
    "fail": ("executor",),
    "release": ("executor",),
    "published": ("executor",),
    "begun": ("executor",),
    "stage": ("executor",),
    "staged": ("executor",),
    "wait": ("executor",),
    "signals": ("executor",),
    "report_progress": ("executor",),
    "complete_with": ("executor",),
    "begin_effect": ("executor",),
    "record_effect": ("executor",),
    "present_begin": ("executor", "reconciler", "authority_admin"),
    "missing_begins": ("executor", "reconciler", "authority_admin"),
    "cancel": ("producer", "reconciler"),
    "requeue": ("reconciler",),
    "pause": ("reconciler",),
    "resume": ("reconciler",),
    "register_schedule": ("executor",),
    "take_schedule": ("executor",),
    "advance_schedule": ("executor",),
    "see_schedules": ("executor",),
    "remove_schedule": ("reconciler",),
    "reconcile": ("reconciler",),
    "protect": ("authority_admin",),
    "unprotect": ("authority_admin",),
    "begin_protection": ("authority_admin",),
    "end_protection": ("authority_admin",),
    "protection": ("reconciler", "authority_admin", "reader"),
    "assign_effect": ("reconciler",),
    "take_lookups": ("reconciler",),
    "settle_lookup": ("reconciler",),
    "defer_lookup": ("reconciler",),
    "set_escalation": ("executor",),
    "escalate_effects": ("maintenance",),
    "record_objects": ("executor",),
    "orphans": ("maintenance",),
    "condemn_object": ("maintenance",),
    "forget_object": ("maintenance",),
}

TABLES: dict[str, tuple[LiteralString, ...]] = {
    "outbox": ("relay", "projector"),
    "tick": ("relay", "reader"),
    "parked": ("relay", "reconciler"),
    "overtaken": ("relay", "reconciler", "reader"),
    "destination": ("relay", "reconciler", "reader"),
    "route": ("relay", "reconciler", "reader"),
    "installation": (
        "relay",
        "consumer",
        "executor",
        "projector",
        "reconciler",
        "authority_admin",
        "maintenance",
        "reader",
    ),
    "slot": ("relay", "reader"),
    "relay": ("relay", "reconciler", "reader"),
    "ack": ("relay", "reader"),
    "outbox_child": ("relay", "reader"),
    "recycled": ("relay", "projector", "reader"),
    "dead_letters": ("reconciler", "authority_admin", "reader"),
    "reservation": ("reconciler", "maintenance"),
    "consumer": ("reconciler", "authority_admin", "maintenance", "reader"),
    "consumer_forever": ("reconciler", "authority_admin", "maintenance", "reader"),
    "consumer_topic": ("reconciler", "authority_admin", "maintenance", "reader"),
    "consumer_position": ("consumer", "reconciler", "authority_admin", "reader"),
    "consumer_recovery": ("reconciler", "authority_admin", "reader"),
    "effect": ("reconciler",),
    "effect_event": ("reconciler",),
    "lookup": ("reconciler",),
    "unknown_effects": ("executor", "reconciler", "maintenance", "reader"),
    "decision": ("reconciler", "authority_admin"),
    "job": ("reconciler",),
    "queues": ("executor", "reconciler", "maintenance", "reader"),
    "paused": ("reconciler", "maintenance", "reader"),
    "lifecycle": ("executor", "reconciler", "authority_admin", "reader"),
    "wait": ("reconciler",),
    "signal": ("reconciler",),
    "job_hold": ("reconciler",),
    "job_event": ("reconciler",),
    "job_class": ("reconciler",),
    "archived": ("reconciler",),
    "job_retention": ("reconciler", "authority_admin", "maintenance", "reader"),
    "archive_retention": ("reconciler", "authority_admin", "maintenance", "reader"),
    "agenda": ("reconciler",),
    "attempt": ("reconciler",),
    "publication": ("reconciler",),
    "candidate": ("reconciler",),
    "schedule": ("executor", "reconciler", "reader"),
    "manifest": ("producer", "executor", "reconciler", "reader"),
    "authority_log": ("authority_admin",),
    "tenant": ("reconciler", "authority_admin", "reader"),
    "restriction": ("reconciler", "authority_admin", "reader"),
    "principal": ("reconciler", "authority_admin", "reader"),
    "principal_grant": ("reconciler", "authority_admin", "reader"),
    "lost_begin": ("reconciler", "authority_admin"),
    "migration": ("migrator", "reconciler", "authority_admin", "reader"),
    "status": ("reader", "reconciler", "authority_admin", "maintenance"),
}


EXISTING: LiteralString = "SELECT r.rolname FROM pg_roles AS r WHERE r.rolname = ANY (%(names)s)"
MEMBERSHIPS: LiteralString = """
SELECT pg_has_role(current_user, %(owner)s, 'MEMBER'), pg_has_role(%(migrator)s, %(owner)s, 'MEMBER')"""
OWNED_ELSEWHERE: LiteralString = """
SELECT format('%%s %%s', CASE c.relkind WHEN 'S' THEN 'SEQUENCE' WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, c.oid::regclass)
FROM pg_class AS c
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
  AND pg_get_userbyid(c.relowner) <> %(owner)s
  -- The sequence of an identity column goes with its table.
  AND NOT (c.relkind = 'S' AND EXISTS (SELECT FROM pg_depend AS d
                                       WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'i'))
UNION ALL
SELECT format('ROUTINE %%s', p.oid::regprocedure) FROM pg_proc AS p
WHERE p.pronamespace = 'fencepost'::regnamespace AND pg_get_userbyid(p.proowner) <> %(owner)s
UNION ALL
SELECT 'SCHEMA fencepost' FROM pg_namespace AS n
WHERE n.nspname = 'fencepost' AND pg_get_userbyid(n.nspowner) <> %(owner)s"""
# An older form of a function may stand beside the newer one, for code that calls it still.
FORMS: LiteralString = """
SELECT p.proname, array_agg(p.oid::regprocedure::text ORDER BY p.oid) FROM pg_proc AS p
WHERE p.pronamespace = 'fencepost'::regnamespace AND p.proname = ANY (%(names)s)
GROUP BY p.proname HAVING count(*) > 1"""
REVOKES: tuple[LiteralString, ...] = (
    "REVOKE ALL ON SCHEMA fencepost FROM PUBLIC, {}",
    "REVOKE ALL ON ALL TABLES IN SCHEMA fencepost FROM PUBLIC, {}",
    "REVOKE ALL ON ALL SEQUENCES IN SCHEMA fencepost FROM PUBLIC, {}",
    "REVOKE ALL ON ALL ROUTINES IN SCHEMA fencepost FROM PUBLIC, {}",
)


def role(install: str, name: str) -> str:
    """The cluster-wide name of a role of this installation."""
    return f"fencepost_{install}_{name}"


def create_roles(conn: Connection[tuple[Any, ...]], install: str) -> None:
    """Creates the owner, which cannot log in, and one group role for each row of the matrix; existing ones stay."""
    for statement in missing_roles(conn, install):
        conn.execute(statement)


def missing_roles(conn: Connection[tuple[Any, ...]], install: str) -> list[sql.Composed]:
    """What makes the roles and memberships that are not there; nothing that is there is named, so it needs no right to."""
    owner, migrator = role(install, "owner"), role(install, "migrator")
    have = {str(r[0]) for r in conn.execute(EXISTING, {"names": [role(install, n) for n in ("owner", *ROLES)]})}
    made = [
        sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(role(install, name)))
        for name in ("owner", *ROLES)
        if role(install, name) not in have
    ]
    row = conn.execute(MEMBERSHIPS, {"owner": owner, "migrator": migrator}).fetchone() if not made else None
    mine, theirs = (False, False) if row is None else (bool(row[0]), bool(row[1]))
    if not mine:
        made.append(sql.SQL("GRANT {} TO CURRENT_USER").format(sql.Identifier(owner)))
    if not theirs:
        made.append(sql.SQL("GRANT {} TO {}").format(sql.Identifier(owner), sql.Identifier(migrator)))
    return made


def hand_over(conn: Connection[tuple[Any, ...]], install: str) -> list[sql.Composed]:
    """What makes the owner own schema, tables, sequences and routines, where somebody else does."""
    owner = sql.Identifier(role(install, "owner"))
    found = conn.execute(OWNED_ELSEWHERE, {"owner": role(install, "owner")}).fetchall()
    # Invariant: the kinds come from the statement above, the names are identities that the catalog has quoted.
    return [sql.SQL("ALTER {} OWNER TO {}").format(sql.SQL(cast(LiteralString, thing)), owner) for (thing,) in found]


def statements(conn: Connection[tuple[Any, ...]], install: str) -> list[sql.Composed]:
    """What makes the privileges of every role exactly the matrix, whatever they were; PUBLIC keeps nothing."""
    everybody = sql.SQL(", ").join(sql.Identifier(role(install, name)) for name in ROLES)
    made = [sql.SQL(revoke).format(everybody) for revoke in REVOKES]
    made.append(sql.SQL("GRANT USAGE ON SCHEMA fencepost TO {}").format(everybody))
    # What a later version adds begins without any right of PUBLIC's, in whatever order it is made.
    made.append(
        sql.SQL("ALTER DEFAULT PRIVILEGES FOR ROLE {} REVOKE EXECUTE ON ROUTINES FROM PUBLIC").format(
            sql.Identifier(role(install, "owner"))
        )
    )
    several = dict(conn.execute(FORMS, {"names": list(FUNCTIONS)}).fetchall())
    for name, roles in FUNCTIONS.items():
        # Invariant: these texts are identities that the catalog has quoted.
        forms: list[sql.Composable] = [sql.SQL(cast(LiteralString, form)) for form in several.get(name, ())]
        for form in forms or [sql.Identifier("fencepost", name)]:
            made.append(_grant(sql.SQL("EXECUTE ON FUNCTION {}").format(form), install, roles))
    for name, roles in TABLES.items():
        made.append(_grant(sql.SQL("SELECT ON {}").format(sql.Identifier("fencepost", name)), install, roles))
    return made


def apply(conn: Connection[tuple[Any, ...]], install: str) -> None:
    """Makes the privileges of every role exactly the matrix, in the caller's transaction."""
    for statement in statements(conn, install):
        conn.execute(statement)


def _grant(what: sql.Composed, install: str, roles: tuple[str, ...]) -> sql.Composed:
    return sql.SQL("GRANT {} TO {}").format(what, sql.SQL(", ").join(sql.Identifier(role(install, r)) for r in roles))
