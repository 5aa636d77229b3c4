"""Every refusal is one typed class, grouped by what the caller must do about it.

A function of the database refuses with an SQLSTATE of class ``ZF``, the offending field or fence part as the
error's column and the remedy as its hint; importing this module makes psycopg raise the class registered here.
The same classes are raised by Python code that refuses earlier. All of them survive pickling, and none of them
keeps or shows a payload: of a database error only the primary message, the column and the hint are retained in
text, because a server may be configured to append bound parameters to the context of its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import psycopg
from psycopg.pq import DiagnosticField

__all__ = [
    "BeginsMissing",
    "CommitWasRollback",
    "ComputationDied",
    "ConfigError",
    "ConfirmLost",
    "ContractMismatch",
    "Damaged",
    "EffectLimit",
    "EffectOpen",
    "EffectUnknown",
    "EpochFrozen",
    "EvidenceMissing",
    "FencepostError",
    "FinishOnly",
    "FromDatabase",
    "InvalidArgs",
    "InvalidInput",
    "JournalCorrupt",
    "JournalForeign",
    "JournalInUse",
    "JournalTorn",
    "JournalUnusable",
    "LeaseLost",
    "NewerFormat",
    "NotArmed",
    "NotDispatched",
    "NotFenced",
    "NotQuiescent",
    "NotUnknown",
    "ObjectGone",
    "OperationConflict",
    "Reason",
    "Refused",
    "ReplayRefused",
    "Restricted",
    "RoutesChanged",
    "SecondOwner",
    "StaleEffectAttempt",
    "StaleFence",
    "StaleSlot",
    "Undecodable",
    "UnknownClass",
    "UnknownJob",
    "Unreachable",
    "Unresolved",
    "WitnessMismatch",
    "WrongTransaction",
    "WrongVersion",
]

Reason = Literal[
    # the bytes
    "too_large",
    "empty_payload",
    "byte_order_mark",
    "not_utf8",
    "malformed_json",
    "not_an_object",
    "too_deep",
    "too_many_keys",
    "duplicate_key",
    "float",
    "integer_range",
    "not_finite",
    "lone_surrogate",
    "nul",
    # the envelope
    "missing_attribute",
    "invalid_attribute",
    "duplicate_attribute",
    "mixed_prefixes",
    "wrong_key",
    "unsupported_specversion",
    "unsupported_content_type",
    "structured_mode_unsupported",
    "digest_mismatch",
    # the event
    "unknown_type",
    "newer_version",
    "unknown_version",
    "invalid_content",
]
"""Why an arriving event could not be decoded."""


class FencepostError(Exception):
    """Base of every error of this library; names the field and the remedy, never a payload.

    ``field`` is the offending field or fence part, ``hint`` says what to do. Either may be None.
    """

    field: str | None
    hint: str | None

    def __init__(self, message: str = "", *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.hint = hint

    @property
    def message(self) -> str:
        """The bare sentence, without field and hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        text = self.message
        if self.field is not None:
            text += f" [{self.field}]"
        if self.hint is not None:
            text += f"; {self.hint}"
        return text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, field={self.field!r}, hint={self.hint!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        reduced = super().__reduce__()
        state: dict[str, Any] = dict(reduced[2]) if isinstance(reduced, tuple) and len(reduced) > 2 else {}
        if isinstance(info := state.get("_info"), Mapping):
            # Bound parameters may hide in the context; it stays in the process where it arose.
            kept = cast(Mapping[int, bytes | None], info)
            state["_info"] = {k: None if k in _NEVER_PICKLED else v for k, v in kept.items()}
        return (_blank, (type(self), self.args), state)


_NEVER_PICKLED = frozenset({DiagnosticField.CONTEXT, DiagnosticField.MESSAGE_DETAIL, DiagnosticField.INTERNAL_QUERY})

_E = TypeVar("_E", bound=FencepostError)


def _blank(cls: type[_E], args: tuple[object, ...]) -> _E:
    """An instance with its args only; unpickling adds the state (constructors may demand keywords)."""
    return cls.__new__(cls, *args)


class Refused(FencepostError):
    """Nothing was changed and the same call will be refused again: never retry."""


class Unresolved(FencepostError):
    """The outcome is not known: hand it to reconciliation, do not repeat it."""


class NotDispatched(FencepostError):
    """Certainly nothing left this process: safe to retry."""


class Damaged(FencepostError):
    """Stored bytes do not verify: nothing may be appended before they are repaired."""


class FromDatabase(FencepostError, psycopg.DatabaseError):
    """A refusal with an SQLSTATE: raised by a database function, or earlier by Python with the same meaning.

    ``field`` and ``hint`` are the column and hint of the server's error, or the constructor's arguments.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        hint: str | None = None,
        info: Any = None,
        encoding: str = "utf-8",
        pgconn: Any = None,
    ) -> None:
        psycopg.DatabaseError.__init__(self, info=info, encoding=encoding, pgconn=pgconn)
        if info is not None:
            message = self.diag.message_primary or message.partition("\n")[0]
            field = self.diag.column_name or field
            hint = self.diag.message_hint or hint
        self.args = (message,)
        self.field = field
        self.hint = hint


class NotArmed(Refused, FromDatabase, code="ZF001"):
    """This database may not exercise authority until it is armed (plain restart) or recovered (copy, restore)."""


class WitnessMismatch(Refused, FromDatabase, code="ZF002"):
    """Witness and database disagree; ``field`` is behind, ahead, system_identifier, timeline or installation."""


class InvalidInput(Refused, FromDatabase, code="ZF003"):
    """The value of ``field`` is not acceptable."""


class InvalidArgs(InvalidInput):
    """The args of a job do not fit its handler's model; ``field`` says where. Trying again does not help."""


class WrongTransaction(Refused, FromDatabase, code="ZF004"):
    """The caller's transaction cannot carry this call; ``field`` is isolation, subtransaction or autocommit."""


class OperationConflict(Refused, FromDatabase, code="ZF010"):
    """The same identity was accepted before with another meaning."""


class StaleFence(Refused, FromDatabase, code="ZF020"):
    """The fence no longer holds; ``field`` is the first part that differs.

    One of tenant, operation, class, generation, attempt, owner, epoch, state, lease.
    """


class EpochFrozen(Refused, FromDatabase, code="ZF021"):
    """The tenant is frozen: no new effect may begin."""


class NotFenced(Refused, FromDatabase, code="ZF022"):
    """A protected table was written in a transaction without the fence of the row's tenant and operation.

    ``field`` is fence, tenant or operation (a row that names none), truncate, or columns.
    """


class ObjectGone(NotDispatched, FromDatabase, code="ZF023"):
    """An object to be published is not in its store, or is being removed as an orphan: put it again, then publish again."""


class EffectOpen(Unresolved, FromDatabase, code="ZF030"):
    """An effect is pending or unknown: neither begin nor publish before it is reconciled."""


class EffectLimit(Refused, FromDatabase, code="ZF031"):
    """A second effect key in the strict class; declare the class resumable to allow it."""


class FinishOnly(Refused, FromDatabase, code="ZF032"):
    """This claim may only finish what an accepted effect left open; it may not begin another."""


class StaleEffectAttempt(Refused, FromDatabase, code="ZF033"):
    """The outcome belongs to another effect attempt, or the effect is no longer open."""


class NotQuiescent(Refused, FromDatabase, code="ZF034"):
    """ "Not applied" may not be decided while the provider could still accept the request."""


class WrongVersion(Refused, FromDatabase, code="ZF035"):
    """The expected version differs from the stored one: read again, then decide again."""


class NotUnknown(Refused, FromDatabase, code="ZF036"):
    """Only an unknown effect can be reconciled."""


class EvidenceMissing(Refused, FromDatabase, code="ZF037"):
    """A decision about an effect needs the evidence named by ``field``."""


class StaleSlot(Refused, FromDatabase, code="ZF040"):
    """The slot has another owner or generation by now; nothing was recorded."""


class RoutesChanged(Refused, FromDatabase, code="ZF041"):
    """The destination is registered with another digest of its routes."""


class UnknownJob(Refused, FromDatabase, code="ZF050"):
    """There is no such job."""


class Restricted(Refused, FromDatabase, code="ZF061"):
    """A principal, login, tenant or class is restricted, or was granted nothing; an authority admin may change that."""


class SecondOwner(Refused, FromDatabase, code="ZF060"):
    """Another implementation owns the lifecycle of this class, or the owner has not drained: nothing was claimed or moved."""


class UnknownClass(Refused, FromDatabase, code="ZF051"):
    """There is no such job class."""


class ContractMismatch(Refused):
    """Code and database are too far apart to work together; ``field`` is the one that is too old, database or program."""


class NewerFormat(Refused):
    """A file outside the database was written by a newer version than this one: it is sound, and cannot be read here."""


class ConfigError(Refused, ValueError):
    """A setting, named by ``field``, is missing or unusable."""


class CommitWasRollback(Refused):
    """The server answered COMMIT with ROLLBACK: an error was swallowed inside, and nothing was stored."""


class ReplayRefused(Refused):
    """A replay may not start, go on or replace the tables that are read; ``field`` says what stands in the way."""


class LeaseLost(Refused):
    """This worker's lease is over: stop; results may be staged for the successor, not published."""


class ComputationDied(Unresolved):
    """The process of a computation ended before its result: killed, crashed or too late. Nothing else is lost by it."""


class BeginsMissing(Refused):
    """The journal holds begins of effects that this database does not know: it has lost commits, or is another one."""


class JournalInUse(Refused):
    """Another process writes this journal, or its files were replaced under the writer: nothing was written."""


class JournalForeign(Refused):
    """The journal was written on another machine: it can be read here, not continued."""


class JournalTorn(Damaged):
    """The journal ends as an interrupted write leaves it: nothing is appended before the tail is quarantined."""


class JournalCorrupt(Damaged):
    """The journal was changed, cut or lost a segment after it was written: nothing repairs that by itself."""


class JournalUnusable(NotDispatched):
    """The journal could not be written durably: what should have been recorded first was not begun."""


class ConfirmLost(Unresolved):
    """The broker's confirm did not arrive: the message may or may not be there, send the same bytes again."""


class EffectUnknown(Unresolved):
    """The provider's answer was lost: the effect stays unknown until evidence is recorded."""


class Unreachable(NotDispatched):
    """A service did not answer; ``address`` never contains a user, a password or parameters."""

    address: str | None

    def __init__(
        self, message: str = "", *, address: str | None = None, field: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, field=field, hint=hint)
        self.address = None if address is None else _without_secrets(address)

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.address is None else f"{text} ({self.address})"


def _without_secrets(address: str) -> str:
    """Scheme, host, port and path of a URL; a plain ``host:port`` as it is; nothing else is trusted."""
    if "://" in address:
        parts = urlsplit(address)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "=" in address or " " in address:
        words = (word.partition("=") for word in address.split())
        return " ".join(f"{k}={v}" for k, _, v in words if k in {"host", "hostaddr", "port", "dbname"})
    return address.rpartition("@")[2]


class Undecodable(Refused):
    """An event cannot be read; ``reason`` says why, ``field`` where. The content is never part of the message."""

    reason: Reason

    def __init__(self, message: str = "", *, reason: Reason, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, field=field, hint=hint)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: {super().__str__()}"

    def __repr__(self) -> str:
        return f"Undecodable({self.message!r}, reason={self.reason!r}, field={self.field!r}, hint={self.hint!r})"
