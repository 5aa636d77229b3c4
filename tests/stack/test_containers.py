"""The container files, read and not run: no engine is here. Pinned, without root, healthy by /livez, on loopback only."""

import json
import re
from typing import Any

import pytest
import yaml

from fencepost.operate.settings import DestinationSettings, known_variables
from stack.containers import IMAGES
from stack.places import COMPOSE, REPOSITORY

PASSWORDS = {"POSTGRES_PASSWORD": "p", "RABBITMQ_PASSWORD": "r"}
PINNED = re.compile(r"^[a-z0-9./-]+:\d+\.\d+(\.\d+)?(-[a-z-]+)?$")


def filled(text: str) -> str:
    """As compose fills in variables that must be given."""
    return re.sub(r"\$\{([A-Z_]+):\?[^}]*\}", lambda found: PASSWORDS[found.group(1)], text)


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load(filled((COMPOSE / "compose.yaml").read_text()))


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, continued lines joined."""
    text = (COMPOSE / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_every_image_is_pinned_and_those_of_services_are_the_ones_that_tests_use(compose: Any) -> None:
    images = {name: service["image"] for name, service in compose["services"].items()}
    assert all(PINNED.match(image) for image in images.values()), images
    assert images["postgres"] == IMAGES["postgres18"]
    assert images["rabbitmq"] == IMAGES["rabbitmq"]
    assert images["kafka"] == images["topics"] == IMAGES["kafka"]
    assert images["relay"] == images["migrate"]
    for name in ("migrate", "relay"):
        build = compose["services"][name]["build"]
        assert (COMPOSE / build["context"]).resolve() == REPOSITORY
        assert (REPOSITORY / build["dockerfile"]).is_file()


def test_every_port_is_published_on_loopback_only(compose: Any) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert ports and all(str(port).startswith("127.0.0.1:") for port in ports)


def test_what_stays_up_has_a_health_check_and_the_relay_is_judged_by_liveness_alone(compose: Any) -> None:
    services = compose["services"]
    for name in ("postgres", "rabbitmq", "kafka", "relay"):
        assert {"test", "interval", "timeout", "retries"} <= set(services[name]["healthcheck"]), name
    check = " ".join(services["relay"]["healthcheck"]["test"])
    assert "/livez" in check and "readyz" not in check
    waits = services["relay"]["depends_on"]
    assert waits["migrate"]["condition"] == waits["topics"]["condition"] == "service_completed_successfully"
    assert waits["rabbitmq"]["condition"] == "service_healthy"


def test_the_witness_has_a_volume_of_its_own_and_data_are_named_volumes(compose: Any) -> None:
    services = compose["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose["volumes"]
    for name in ("migrate", "relay"):
        assert services[name]["volumes"] == ["witness:/var/lib/fencepost"]
        assert services[name]["environment"]["FENCEPOST_STATE"] == "/var/lib/fencepost"


def test_settings_in_it_are_ones_that_exist_and_its_destinations_are_valid(compose: Any) -> None:
    environment = compose["services"]["relay"]["environment"]
    assert set(environment) <= known_variables()
    found = [DestinationSettings.model_validate(d) for d in json.loads(environment["FENCEPOST_DESTINATIONS"])]
    assert [d.kind for d in found] == ["kafka", "rabbitmq"]
    topic = compose["services"]["topics"]["command"]
    assert found[0].routes[0].to in topic and "--if-not-exists" in topic


def test_no_password_is_written_down(compose: Any) -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    for line in text.splitlines():
        if re.search(r"PASS(WORD)?\b.*:|://", line) and not line.lstrip().startswith("#"):
            assert "${" in line or "http://127.0.0.1" in line or "://:" in line or "INSIDE://" in line, line


def test_the_image_is_built_in_stages_pinned_and_does_not_run_as_root(steps: list[tuple[str, str]]) -> None:
    bases = [argument.split()[0] for name, argument in steps if name == "FROM"]
    assert len(bases) == 2 and all(re.match(r"^python:3\.12\.\d+-slim-bookworm$", base) for base in bases)
    last = max(index for index, (name, _) in enumerate(steps) if name == "FROM")
    final = steps[last:]
    users = [argument for name, argument in final if name == "USER"]
    assert users and re.match(r"^[1-9]\d+:[1-9]\d+$", users[-1])
    assert ("ENTRYPOINT", '["fencepost"]') in final
    (check,) = [argument for name, argument in final if name == "HEALTHCHECK"]
    assert "/livez" in check
    # Nothing but the built environment is taken over.
    assert [a for name, a in final if name == "COPY"] == ["--from=build /opt/fencepost /opt/fencepost"]


def test_what_is_copied_into_the_build_exists_and_is_let_in(steps: list[tuple[str, str]]) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    for name, argument in steps:
        if name == "COPY" and not argument.startswith("--from"):
            for source in argument.split()[:-1]:
                assert (REPOSITORY / source).exists() and source.rstrip("/") in allowed
