"""Settings from the environment (FENCEPOST_*), secret files and `fencepost.toml`, in this order; no value is ever shown.

    database = "postgresql://app@127.0.0.1:5432/app"    # FENCEPOST_DATABASE
    state = ".fencepost"                                # FENCEPOST_STATE, the folder of the file witness
    witness = "postgresql://w@10.0.0.9/witness"         # FENCEPOST_WITNESS, a second database in place of that file

    [relay]                                             # FENCEPOST_RELAY_LEASE and so on, seconds
    lease = 30
    health_address = "127.0.0.1:8089"                   # or "off"

    [consumer]                                          # FENCEPOST_CONSUMER_KIND and so on
    kind = "kafka"
    address = "kafka.example:9093"
    topics = ["reports"]

    [worker]                                            # FENCEPOST_WORKER_JOURNAL, FENCEPOST_WORKER_DOORBELL
    journal = "journal"                                 # a folder of this worker's own

    [[destinations]]                                    # FENCEPOST_DESTINATIONS, the same as JSON
    name = "reports"
    kind = "kafka"
    address = "kafka.example:9093"
    routes = [{ match = "report.*", to = "reports" }]
    options = { "security.protocol" = "SASL_SSL", "sasl.mechanism" = "SCRAM-SHA-512", "sasl.username" = "relay",
                "sasl.password" = { file = "kafka_password" } }

The file is `$FENCEPOST_CONFIG`, else `fencepost.toml` in the current folder, where there is one. Secret files are in
the folder `$FENCEPOST_SECRETS_DIR`: `fencepost_database` there is the same as FENCEPOST_DATABASE, and `{ file = "..." }`
as an address or an option is the content of that file.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from fencepost.schemas.connect import checked_address
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.witness import Witness
from fencepost.schemas.witness_database import DatabaseWitness

__all__ = [
    "ConsumerSettings",
    "DestinationSettings",
    "RelaySettings",
    "RouteSettings",
    "Settings",
    "WorkerSettings",
    "known_variables",
    "load",
    "unknown_variables",
]

FILE = "fencepost.toml"
PREFIX = "FENCEPOST_"
RELAY_PREFIX = "FENCEPOST_RELAY_"
CONSUMER_PREFIX = "FENCEPOST_CONSUMER_"
WORKER_PREFIX = "FENCEPOST_WORKER_"
SECRETS = "FENCEPOST_SECRETS_DIR"
SECRET_BYTES_MAX = 65_536
# Read by compose/, by tests and by the choice of the files; not settings of a command.
ELSEWHERE = frozenset({"FENCEPOST_CONFIG", SECRETS, "FENCEPOST_CACHE", "FENCEPOST_NO_STACK"})
ELSEWHERE_PREFIX = "FENCEPOST_TEST_"

MATCH = re.compile(r"\*|[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*(\.\*)?")
VERSIONED = re.compile(r"\.v[0-9]+$")
HEALTH_ADDRESS = "127.0.0.1:8089"
IN_JSON = ("topics", "routing_keys", "options")
CONSUMER_HEALTH_ADDRESS = "127.0.0.1:8090"
WORKER_HEALTH_ADDRESS = "127.0.0.1:8091"
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
S = TypeVar("S", bound=BaseSettings)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class RouteSettings(_Table):
    """Events whose type matches go to a topic, or to an exchange under a routing key."""

    match: str
    to: str
    routing_key: str = "{type}"

    @field_validator("match")
    @classmethod
    def _can_match(cls, value: str) -> str:
        """What no type can ever match would park every event that it was meant for."""
        if not MATCH.fullmatch(value) or VERSIONED.search(value):
            raise ValueError("not a type in lower case without its version, a prefix ending in .*, or *")
        return value


class DestinationSettings(_Table):
    """One broker and the routes that lead to it; address and options may hold credentials and are never shown.

    `on_refusal`: whether a refused event holds its key back ("block") or lets it pass. `declare`: make missing topics (with
    the options `partitions` and `replication`) or exchanges (durable, of type topic) at the start. `mode`: CloudEvents in
    headers and the payload as it is ("binary"), or everything in one JSON document ("structured").
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")
    kind: Literal["kafka", "rabbitmq"]
    address: SecretStr
    routes: tuple[RouteSettings, ...] = Field(min_length=1)
    options: dict[str, SecretStr] = Field(default_factory=dict)
    insecure: bool = False
    on_refusal: Literal["block", "pass"] = "block"
    declare: bool = False
    mode: Literal["binary", "structured"] = "binary"

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return _of_a_broker(value)


class _Sources(BaseSettings):
    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, env_ignore_empty=True, case_sensitive=False
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment before secret files before what the file says."""
        return env_settings, file_secret_settings, init_settings


class RelaySettings(_Sources):
    """Times of the relay in seconds, its limits, and how long `relay run --once` is patient.

    `answer` bounds one statement, `stalled` the time without a step after which `/livez` says no; `health_exposed`
    allows a health address off loopback; `doorbell` lets an idle relay sleep until it is rung.
    """

    model_config = SettingsConfigDict(env_prefix=RELAY_PREFIX)

    lease: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = 30.0
    refresh: Seconds = 2.0
    confirm: Seconds = 10.0
    poll_min: Seconds = 0.01
    poll_max: Seconds = 0.5
    drain: Seconds = 10.0
    answer: Seconds = 15.0
    stalled: Seconds = 60.0
    patience: Seconds = 15.0
    batch: int = Field(default=2000, ge=1, le=100_000)
    ahead: int = Field(default=4, ge=1, le=64)
    health_address: str = HEALTH_ADDRESS
    health_exposed: bool = False
    doorbell: bool = False


class ConsumerSettings(_Sources):
    """The broker of a consumer whose target is a handler, the limits of its runner in seconds, and where health is served.

    `topics`, `group` are for Kafka; `queue`, `exchange`, `routing_keys`, `declare`, `delivery_limit`, `prefetch` for
    RabbitMQ; `options` as those of a destination. `stalled`: the time without a step after which `/livez` says no.
    """

    model_config = SettingsConfigDict(env_prefix=CONSUMER_PREFIX)

    kind: Literal["kafka", "rabbitmq"] | None = None
    address: SecretStr | None = None
    options: dict[str, SecretStr] = Field(default_factory=dict)
    insecure: bool = False
    topics: tuple[str, ...] = ()
    group: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_keys: tuple[str, ...] = ("#",)
    declare: bool = False
    delivery_limit: int = 20
    prefetch: int = 16
    concurrency: int = 4
    batch: int = 1
    max_attempts: int = 5
    drain: Seconds = 25.0
    start: Seconds = 30.0
    answer: Seconds = 60.0
    stalled: Seconds = 60.0
    health_address: str = CONSUMER_HEALTH_ADDRESS
    health_exposed: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return _of_a_broker(value)


class WorkerSettings(_Sources):
    """Where a worker keeps its journal; None: it keeps none. A folder belongs to one worker.

    `doorbell` lets an idle worker be rung as soon as work is due. `stalled`: the time without a step after which `/livez`
    says no.
    """

    model_config = SettingsConfigDict(env_prefix=WORKER_PREFIX)

    journal: Path | None = None
    doorbell: bool = False
    stalled: Seconds = 60.0
    health_address: str = WORKER_HEALTH_ADDRESS
    health_exposed: bool = False


class _General(_Sources):
    model_config = SettingsConfigDict(env_prefix=PREFIX)

    database: SecretStr | None = None
    insecure_db: bool = False
    state: Path = Path(".fencepost")
    witness: SecretStr | None = None
    destinations: tuple[DestinationSettings, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """What every command reads; `state` is the folder of the file witness."""

    database: SecretStr | None
    state: Path
    destinations: tuple[DestinationSettings, ...]
    relay: RelaySettings
    consumer: ConsumerSettings
    worker: WorkerSettings
    insecure_db: bool = False
    witness: SecretStr | None = None

    def outside(self) -> Path | Witness:
        """Where the witness is: the second database that `witness` names, else the folder of the file."""
        found = "" if self.witness is None else self.witness.get_secret_value()
        return DatabaseWitness(checked_address(found, insecure=self.insecure_db)) if found else self.state

    def dsn(self, *, insecure: bool = False) -> str:
        """The database's connection string, for connecting and never for showing.

        ConfigError when it is not set, or leads off this machine to a server that would not be verified, unless
        `insecure` or the setting `insecure_db` allows that.
        """
        found = "" if self.database is None else self.database.get_secret_value()
        if not found:
            raise ConfigError(
                "no database is set", field="FENCEPOST_DATABASE", hint="example: postgresql://user@127.0.0.1:5432/name"
            )
        return checked_address(found, insecure=insecure or self.insecure_db)


def load() -> Settings:
    """The settings of this process, or ConfigError naming the first one that is wrong; values are never quoted."""
    path, values = _file()
    relay = _checked(RelaySettings, _table(values, "relay", path), "relay", RELAY_PREFIX)
    consumer = _checked(ConsumerSettings, _table(values, "consumer", path), "consumer", CONSUMER_PREFIX)
    worker = _checked(WorkerSettings, _table(values, "worker", path), "worker", WORKER_PREFIX)
    found = _checked(_General, values, "", PREFIX)
    names = [d.name for d in found.destinations]
    if len(set(names)) < len(names):
        raise ConfigError("two destinations have the same name", field="destinations", hint="rename one of them")
    return Settings(
        found.database,
        found.state,
        found.destinations,
        relay,
        consumer,
        worker,
        found.insecure_db,
        found.witness,
    )


def known_variables() -> frozenset[str]:
    """Every FENCEPOST_* variable that something reads."""
    own = {f"{PREFIX}{name.upper()}" for name in _General.model_fields}
    relay = {f"{RELAY_PREFIX}{name.upper()}" for name in RelaySettings.model_fields}
    consumer = {f"{CONSUMER_PREFIX}{name.upper()}" for name in ConsumerSettings.model_fields}
    worker = {f"{WORKER_PREFIX}{name.upper()}" for name in WorkerSettings.model_fields}
    return frozenset(own | relay | consumer | worker | ELSEWHERE)


def unknown_variables() -> list[str]:
    """FENCEPOST_* variables of this process that nothing reads: misspelt, or of another version."""
    known = known_variables()
    ours = [n for n in os.environ if n.startswith(PREFIX) and not n.startswith(ELSEWHERE_PREFIX)]
    return sorted(name for name in ours if name not in known)


def _file() -> tuple[Path, dict[str, Any]]:
    named = os.environ.get("FENCEPOST_CONFIG")
    path = Path(named or FILE)
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise ConfigError(
                f"there is no file {path}", field="FENCEPOST_CONFIG", hint="create it or unset it"
            ) from None
        return path, {}
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{path} cannot be read as UTF-8 text", field="FENCEPOST_CONFIG") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", field="FENCEPOST_CONFIG", hint="correct the file") from None


def _table(values: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = values.pop(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is not a table", field=name, hint=f"write [{name}] in {path}")
    return cast(dict[str, Any], found)


def _of_a_broker(value: Any) -> Any:
    """TOML has numbers and booleans; the clients' options are text. What is in a secret file is read here."""
    if not isinstance(value, dict):
        return value
    given = dict(cast(dict[str, Any], value))
    if "address" in given:
        given["address"] = _secret(given["address"])
    if isinstance(options := given.get("options"), dict):
        given["options"] = {str(k): _text(_secret(v)) for k, v in cast(dict[str, Any], options).items()}
    return given


def _checked(model: type[S], values: dict[str, Any], table: str, prefix: str) -> S:
    make = cast(Any, partial(model, _secrets_dir=_secrets_folder(), **values))
    try:
        return cast(S, make())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ConfigError(
            _lower(first["msg"].removeprefix("Value error, ")),
            field=_field(first["loc"], table, prefix),
            hint="correct the setting",
        ) from None
    except SettingsError as error:
        # Its text is not repeated.
        if prefix == CONSUMER_PREFIX:
            named = next((name for name in IN_JSON if f'"{name}"' in str(error)), "topics")
            raise ConfigError(
                "the variable, or the secret file, is not JSON",
                field=f"{prefix}{named.upper()}",
                hint='a list like ["reports"], or for options an object',
            ) from None
        raise ConfigError(
            "the variable, or the secret file, is not JSON",
            field=f"{PREFIX}DESTINATIONS",
            hint='example: [{"name": "reports", "kind": "kafka", "address": "127.0.0.1:9092",'
            ' "routes": [{"match": "*", "to": "reports"}]}]',
        ) from None


def _field(location: tuple[int | str, ...], table: str, prefix: str) -> str:
    variable = f"{prefix}{location[0]}".upper() if location else ""
    head = variable if variable in os.environ else ".".join(filter(None, (table, str(location[0]) if location else "")))
    return head + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _text(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _secrets_folder() -> Path | None:
    named = os.environ.get(SECRETS)
    if not named:
        return None
    if not Path(named).is_dir():
        raise ConfigError("there is no such folder", field=SECRETS, hint="create it or unset it")
    return Path(named)


def _secret(value: object) -> object:
    """The value as given, or for `{ file = "name" }` what that secret file holds, without the line's end."""
    if not isinstance(value, dict):
        return value
    given = cast(dict[str, object], value)
    if set(given) != {"file"}:
        return given
    name = str(given["file"])
    folder = _secrets_folder()
    if folder is None:
        raise ConfigError(f"the secret file {name} has no folder", field=SECRETS, hint="set it to the folder")
    path = folder / name
    if path.parent != folder or not path.is_file():
        raise ConfigError(f"there is no secret file {name}", field=SECRETS, hint="a plain name in that folder")
    try:
        with path.open("rb") as file:
            found = file.read(SECRET_BYTES_MAX + 1)
        if len(found) > SECRET_BYTES_MAX:
            raise ConfigError(f"the secret file {name} is too large", field=SECRETS)
        return found.decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"the secret file {name} cannot be read as UTF-8 text", field=SECRETS) from None
