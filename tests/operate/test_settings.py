"""Settings: the environment wins, a wrong one is named, and no value is ever repeated."""

from pathlib import Path

import pytest

from fencepost.operate import settings
from fencepost.schemas.errors import ConfigError

SECRET = "hunter2"
FILE = """
database = "postgresql://app:hunter2@127.0.0.1:5432/app"
state = "kept"

[relay]
lease = 20

[[destinations]]
name = "reports"
kind = "kafka"
address = "127.0.0.1:9092"
routes = [{ match = "report.*", to = "reports" }]
options = { "linger.ms" = 3 }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DATABASE", "STATE", "DESTINATIONS", "CONFIG", "RELAY_LEASE"):
        monkeypatch.delenv(f"FENCEPOST_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(field: str) -> str:
    """Loads, expects a refusal that names the field, and returns its text."""
    with pytest.raises(ConfigError) as caught:
        settings.load().dsn()
    assert caught.value.field == field
    assert SECRET not in str(caught.value) and SECRET not in repr(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def test_file_is_read_and_environment_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fencepost.toml").write_text(FILE)

    found = settings.load()
    assert found.relay.lease == 20
    assert found.state == Path("kept")
    assert found.destinations[0].routes[0].to == "reports"
    assert found.destinations[0].options["linger.ms"].get_secret_value() == "3"

    monkeypatch.setenv("FENCEPOST_RELAY_LEASE", "7.5")
    monkeypatch.setenv("FENCEPOST_STATE", "elsewhere")
    monkeypatch.setenv("FENCEPOST_DATABASE", "postgresql://other@127.0.0.1/db")
    changed = settings.load()
    assert changed.relay.lease == 7.5
    assert changed.state == Path("elsewhere")
    assert changed.dsn() == "postgresql://other@127.0.0.1/db"


def test_addresses_and_options_are_not_part_of_any_representation(folder: Path) -> None:
    (folder / "fencepost.toml").write_text(FILE.replace("127.0.0.1:9092", f"u:{SECRET}@127.0.0.1:9092"))

    found = settings.load()

    assert SECRET in found.dsn()
    assert SECRET not in repr(found) + str(found)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("lease = 20", 'lease = "hunter2"'), "relay.lease"),
        (("lease = 20", "lease = 0.5"), "relay.lease"),
        (("lease = 20", "leese = 20"), "relay.leese"),
        (('state = "kept"', 'stat = "hunter2"'), "stat"),
        (('kind = "kafka"', 'kind = "hunter2"'), "destinations[0].kind"),
        (('name = "reports"', 'name = "Hunter2 hunter2"'), "destinations[0].name"),
        (('to = "reports"', 'two = "hunter2"'), "destinations[0].routes[0].to"),
        (("[relay]", "[[relay]]"), "relay"),
        (("[relay]", "[relay"), "FENCEPOST_CONFIG"),
    ],
)
def test_wrong_setting_is_named_and_not_quoted(folder: Path, change: tuple[str, str], field: str) -> None:
    (folder / "fencepost.toml").write_text(FILE)
    assert settings.load().dsn()

    (folder / "fencepost.toml").write_text(FILE.replace(*change))
    refused(field)


def test_wrong_variable_is_named_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_DATABASE", "postgresql://app@127.0.0.1/app")
    monkeypatch.setenv("FENCEPOST_RELAY_LEASE", "20")
    assert settings.load().dsn()

    monkeypatch.setenv("FENCEPOST_RELAY_LEASE", SECRET)
    refused("FENCEPOST_RELAY_LEASE")


def test_destinations_that_are_not_json_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = '{"name": "a", "kind": "kafka", "address": "h:1", "routes": [{"match": "*", "to": "t"}]}'
    monkeypatch.setenv("FENCEPOST_DATABASE", "postgresql://app@127.0.0.1/app")
    monkeypatch.setenv("FENCEPOST_DESTINATIONS", f"[{one}]")
    assert len(settings.load().destinations) == 1

    monkeypatch.setenv("FENCEPOST_DESTINATIONS", f"[{one}, {SECRET}")
    assert "JSON" in refused("FENCEPOST_DESTINATIONS")
    monkeypatch.setenv("FENCEPOST_DESTINATIONS", f"[{one}, {one}]")
    assert "same name" in refused("destinations")


def test_missing_database_and_missing_file_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "postgresql://" in refused("FENCEPOST_DATABASE")
    monkeypatch.setenv("FENCEPOST_CONFIG", "nowhere.toml")
    assert "nowhere.toml" in refused("FENCEPOST_CONFIG")
