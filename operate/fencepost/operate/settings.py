"""Settings from the environment (FENCEPOST_*) and `fencepost.toml`; the environment wins, and no value is ever shown.

    database = "postgresql://app@127.0.0.1:5432/app"    # FENCEPOST_DATABASE
    state = ".fencepost"                                # FENCEPOST_STATE, the folder of the file witness

    [relay]                                             # FENCEPOST_RELAY_LEASE and so on, seconds
    lease = 30

    [[destinations]]                                    # FENCEPOST_DESTINATIONS, the same as JSON
    name = "reports"
    kind = "kafka"
    address = "127.0.0.1:9092"
    routes = [{ match = "report.*", to = "reports" }]

The file is `$FENCEPOST_CONFIG`, else `fencepost.toml` in the current folder, where there is one.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from fencepost.schemas.errors import ConfigError

__all__ = [
    "DestinationSettings",
    "RelaySettings",
    "RouteSettings",
    "Settings",
    "known_variables",
    "load",
    "unknown_variables",
]

FILE = "fencepost.toml"
PREFIX = "FENCEPOST_"
RELAY_PREFIX = "FENCEPOST_RELAY_"
# Read by compose/, by tests and by the choice of the file; not settings of a command.
ELSEWHERE = frozenset({"FENCEPOST_CONFIG", "FENCEPOST_CACHE", "FENCEPOST_NO_STACK"})
ELSEWHERE_PREFIX = "FENCEPOST_TEST_"

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
S = TypeVar("S", bound=BaseSettings)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class RouteSettings(_Table):
    """Events whose type matches go to a topic, or to an exchange under a routing key."""

    match: str = Field(min_length=1)
    to: str
    routing_key: str = "{type}"


class DestinationSettings(_Table):
    """One broker and the routes that lead to it; address and options may hold credentials and are never shown.

    `on_refusal`: whether a refused event holds its key back ("block") or lets it pass. `declare`: make missing topics (with
    the options `partitions` and `replication`) or exchanges (durable, of type topic) at the start.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")
    kind: Literal["kafka", "rabbitmq"]
    address: SecretStr
    routes: tuple[RouteSettings, ...] = Field(min_length=1)
    options: dict[str, SecretStr] = Field(default_factory=dict)
    insecure: bool = False
    on_refusal: Literal["block", "pass"] = "block"
    declare: bool = False

    @model_validator(mode="before")
    @classmethod
    def _options_as_text(cls, value: Any) -> Any:
        """TOML has numbers and booleans; the clients' options are text."""
        if isinstance(value, dict) and isinstance(options := cast(dict[str, Any], value).get("options"), dict):
            texts = {str(k): _text(v) for k, v in cast(dict[str, Any], options).items()}
            return {**cast(dict[str, Any], value), "options": texts}
        return cast(Any, value)


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
        """The environment before what the file says."""
        return env_settings, init_settings


class RelaySettings(_Sources):
    """Times of the relay in seconds, and how long `relay run --once` and a first connection are patient."""

    model_config = SettingsConfigDict(env_prefix=RELAY_PREFIX)

    lease: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = 30.0
    refresh: Seconds = 2.0
    confirm: Seconds = 10.0
    poll_min: Seconds = 0.01
    poll_max: Seconds = 0.5
    drain: Seconds = 10.0
    patience: Seconds = 15.0
    batch: int = Field(default=2000, ge=1, le=100_000)


class _General(_Sources):
    model_config = SettingsConfigDict(env_prefix=PREFIX)

    database: SecretStr | None = None
    state: Path = Path(".fencepost")
    destinations: tuple[DestinationSettings, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """What every command reads; `state` is the folder of the file witness."""

    database: SecretStr | None
    state: Path
    destinations: tuple[DestinationSettings, ...]
    relay: RelaySettings

    def dsn(self) -> str:
        """The database's connection string, for connecting and never for showing; ConfigError when it is not set."""
        found = "" if self.database is None else self.database.get_secret_value()
        if not found:
            raise ConfigError(
                "no database is set", field="FENCEPOST_DATABASE", hint="example: postgresql://user@127.0.0.1:5432/name"
            )
        return found


def load() -> Settings:
    """The settings of this process, or ConfigError naming the first one that is wrong; values are never quoted."""
    path, values = _file()
    relay = values.pop("relay", {})
    if not isinstance(relay, dict):
        raise ConfigError("relay is not a table", field="relay", hint=f"write [relay] in {path}")
    times = _checked(RelaySettings, cast(dict[str, Any], relay), "relay", RELAY_PREFIX)
    found = _checked(_General, values, "", PREFIX)
    names = [d.name for d in found.destinations]
    if len(set(names)) < len(names):
        raise ConfigError("two destinations have the same name", field="destinations", hint="rename one of them")
    return Settings(found.database, found.state, found.destinations, times)


def known_variables() -> frozenset[str]:
    """Every FENCEPOST_* variable that something reads."""
    own = {f"{PREFIX}{name.upper()}" for name in _General.model_fields}
    relay = {f"{RELAY_PREFIX}{name.upper()}" for name in RelaySettings.model_fields}
    return frozenset(own | relay | ELSEWHERE)


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


def _checked(model: type[S], values: dict[str, Any], table: str, prefix: str) -> S:
    make = cast(Any, partial(model, **values))
    try:
        return cast(S, make())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ConfigError(
            _lower(first["msg"]), field=_field(first["loc"], table, prefix), hint="correct the setting"
        ) from None
    except SettingsError:
        # A variable that must be JSON and is not; its text is not repeated.
        broken = next((n for n in ("DESTINATIONS",) if os.environ.get(prefix + n)), "")
        raise ConfigError(
            "the variable is not JSON",
            field=prefix + broken,
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
