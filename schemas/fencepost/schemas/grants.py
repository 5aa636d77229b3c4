"""Who may do what: the privilege matrix of the database contract, and nothing outside it.

Role names carry the installation (roles belong to the whole cluster). They cannot log in: grant them to your logins.
"""

from __future__ import annotations

from typing import Any, LiteralString

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
    "tip": ("reconciler", "authority_admin", "armer", "reader"),
    "arm": ("authority_admin", "armer"),
    "beat": ("armer",),
    "lease_duty": ("armer", "maintenance"),
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
    "retry_dead_letter": ("reconciler",),
    "discard_dead_letter": ("reconciler",),
    "read_dead_letter": ("reconciler",),
    "set_inbox_retention": ("authority_admin",),
    "keep_type": ("authority_admin",),
    "advance_horizon": ("maintenance",),
    "purge_reservations": ("maintenance",),
    "purge_deliveries": ("maintenance",),
    "register_class": ("executor",),
    "claim": ("executor",),
    "renew": ("executor",),
    "fence": ("executor",),
    "complete": ("executor",),
    "fail": ("executor",),
    "release": ("executor",),
    "published": ("executor",),
    "begun": ("executor",),
    "stage": ("executor",),
    "staged": ("executor",),
    "begin_effect": ("executor",),
    "record_effect": ("executor",),
    "cancel": ("producer", "reconciler"),
    "requeue": ("reconciler",),
    "reconcile": ("reconciler",),
}

TABLES: dict[str, tuple[LiteralString, ...]] = {
    "outbox": ("relay",),
    "tick": ("relay", "reader"),
    "parked": ("relay", "reconciler"),
    "overtaken": ("relay", "reconciler", "reader"),
    "destination": ("relay", "reconciler", "reader"),
    "route": ("relay", "reconciler", "reader"),
    "installation": ("relay", "consumer", "executor", "reconciler", "authority_admin", "reader"),
    "slot": ("relay", "reader"),
    "relay": ("relay", "reconciler", "reader"),
    "ack": ("relay", "reader"),
    "outbox_child": ("relay", "reader"),
    "recycled": ("relay", "reader"),
    "dead_letters": ("reconciler", "reader"),
    "reservation": ("reconciler", "maintenance"),
    "consumer": ("reconciler", "authority_admin", "maintenance", "reader"),
    "consumer_forever": ("reconciler", "authority_admin", "maintenance", "reader"),
    "consumer_topic": ("reconciler", "authority_admin", "maintenance", "reader"),
    "effect": ("reconciler",),
    "effect_event": ("reconciler",),
    "decision": ("reconciler", "authority_admin"),
    "job": ("reconciler",),
    "authority_log": ("authority_admin",),
    "migration": ("migrator", "reconciler", "authority_admin", "reader"),
    "status": ("reader", "reconciler", "authority_admin", "maintenance"),
}


def role(install: str, name: str) -> str:
    """The cluster-wide name of a role of this installation."""
    return f"fencepost_{install}_{name}"


def create_roles(conn: Connection[tuple[Any, ...]], install: str) -> None:
    """Creates the owner, which cannot log in, and one group role for each row of the matrix; existing ones stay."""
    for name in ("owner", *ROLES):
        found = conn.execute("SELECT FROM pg_roles WHERE rolname = %(name)s", {"name": role(install, name)}).fetchone()
        if found is None:
            conn.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(role(install, name))))
    owner = sql.Identifier(role(install, "owner"))
    conn.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(owner))
    conn.execute(sql.SQL("GRANT {} TO {}").format(owner, sql.Identifier(role(install, "migrator"))))


def apply(conn: Connection[tuple[Any, ...]], install: str) -> None:
    """Makes the privileges of every role exactly the matrix, in the caller's transaction."""
    everybody = sql.SQL(", ").join(sql.Identifier(role(install, name)) for name in ROLES)
    conn.execute(sql.SQL("REVOKE ALL ON ALL TABLES IN SCHEMA fencepost FROM PUBLIC, {}").format(everybody))
    conn.execute(sql.SQL("REVOKE ALL ON ALL SEQUENCES IN SCHEMA fencepost FROM PUBLIC, {}").format(everybody))
    conn.execute(sql.SQL("REVOKE ALL ON ALL ROUTINES IN SCHEMA fencepost FROM PUBLIC, {}").format(everybody))
    conn.execute(sql.SQL("GRANT USAGE ON SCHEMA fencepost TO {}").format(everybody))
    for name, roles in FUNCTIONS.items():
        _grant(conn, sql.SQL("EXECUTE ON FUNCTION {}").format(sql.Identifier("fencepost", name)), install, roles)
    for name, roles in TABLES.items():
        _grant(conn, sql.SQL("SELECT ON {}").format(sql.Identifier("fencepost", name)), install, roles)


def _grant(conn: Connection[tuple[Any, ...]], what: sql.Composed, install: str, roles: tuple[str, ...]) -> None:
    conn.execute(
        sql.SQL("GRANT {} TO {}").format(what, sql.SQL(", ").join(sql.Identifier(role(install, r)) for r in roles))
    )
