"""Settings: the environment wins, a wrong one is named, and no value is ever repeated."""

import os
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
    for name in [n for n in os.environ if n.startswith("FENCEPOST_")]:
        monkeypatch.delenv(name)
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
        (('kind = "kafka"', 'kind = "kafka"\nmode = "hunter2"'), "destinations[0].mode"),
        (("lease = 20", 'lease = "hunter2"'), "relay.lease"),
        (("lease = 20", "lease = 0.5"), "relay.lease"),
        (("lease = 20", "leese = 20"), "relay.leese"),
        (('state = "kept"', 'stat = "hunter2"'), "stat"),
        (('kind = "kafka"', 'kind = "hunter2"'), "destinations[0].kind"),
        (('name = "reports"', 'name = "Hunter2 hunter2"'), "destinations[0].name"),
        (('to = "reports"', 'two = "hunter2"'), "destinations[0].routes[0].to"),
        (('match = "report.*"', 'match = "hunter2*"'), "destinations[0].routes[0].match"),
        (('match = "report.*"', 'match = "Hunter2"'), "destinations[0].routes[0].match"),
        (('match = "report.*"', 'match = "report.hunter2.v1"'), "destinations[0].routes[0].match"),
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


def test_secret_files_are_read_below_the_environment_and_above_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "fencepost.toml").write_text(FILE)
    secrets = folder / "secrets"
    secrets.mkdir()
    monkeypatch.setenv("FENCEPOST_SECRETS_DIR", str(secrets))
    assert settings.load().dsn().endswith("@127.0.0.1:5432/app")

    (secrets / "fencepost_database").write_text("postgresql://secret@127.0.0.1/db\n")
    (secrets / "fencepost_relay_lease").write_text("25")
    found = settings.load()
    assert found.dsn() == "postgresql://secret@127.0.0.1/db"
    assert found.relay.lease == 25

    monkeypatch.setenv("FENCEPOST_DATABASE", "postgresql://environment@127.0.0.1/db")
    assert settings.load().dsn() == "postgresql://environment@127.0.0.1/db"


def test_address_and_options_of_a_destination_may_come_from_secret_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILE.replace('"127.0.0.1:9092"', '{ file = "address" }').replace(
        '"linger.ms" = 3', '"sasl.password" = { file = "password" }'
    )
    (folder / "fencepost.toml").write_text(text)
    (folder / "address").write_text("127.0.0.1:9092\n")
    (folder / "password").write_text(SECRET + "\r\n")
    monkeypatch.setenv("FENCEPOST_SECRETS_DIR", str(folder))
    found = settings.load().destinations[0]
    assert found.address.get_secret_value() == "127.0.0.1:9092"
    assert found.options["sasl.password"].get_secret_value() == SECRET
    assert SECRET not in repr(found)

    (folder / "password").unlink()
    assert "no secret file password" in refused("destinations[0]")
    (folder / "fencepost.toml").write_text(text.replace('"password" }', '"../password" }'))
    refused("destinations[0]")
    monkeypatch.delenv("FENCEPOST_SECRETS_DIR")
    assert "FENCEPOST_SECRETS_DIR" in refused("destinations[0]")


def test_a_folder_of_secrets_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_DATABASE", "postgresql://app@127.0.0.1/app")
    assert settings.load().dsn()
    monkeypatch.setenv("FENCEPOST_SECRETS_DIR", "nowhere")
    refused("FENCEPOST_SECRETS_DIR")


def test_a_database_elsewhere_must_be_verified_or_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    far = f"postgresql://app:{SECRET}@db.example/app"
    monkeypatch.delenv("PGSSLMODE", raising=False)
    monkeypatch.setenv("FENCEPOST_DATABASE", f"{far}?sslmode=verify-full")
    assert settings.load().dsn()

    monkeypatch.setenv("FENCEPOST_DATABASE", far)
    assert "verify-full" in refused("database")
    assert settings.load().dsn(insecure=True) == far
    monkeypatch.setenv("FENCEPOST_INSECURE_DB", "true")
    assert settings.load().dsn() == far
