"""Java programs from their published jars, fetched by Maven once into the cache folder, checked against their checksums."""

import hashlib
import shutil
from pathlib import Path

from . import places
from .preparing import prepared
from .process import Unavailable, run

FETCH_SECONDS = 300.0


def fetched(name: str, service: str) -> Path:
    """The folder with the jars that `compose/<name>/pom.xml` names; raises Unavailable for the service without Maven."""
    pom = places.COMPOSE / name / "pom.xml"

    def fetch(scratch: Path) -> Path:
        maven = shutil.which("mvn")
        if maven is None:
            raise Unavailable(f"{service}: no mvn found to fetch its jars; as root on Debian run compose/install")
        jars = scratch / "jars"
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={jars}", "-DincludeScope=runtime"]
        run([maven, "-q", "-B", "-C", "-f", str(pom), *goal], within=FETCH_SECONDS)
        return jars

    wanted = hashlib.sha256(pom.read_bytes()).hexdigest()[:12]
    return prepared(places.cache_folder() / f"{name}-{wanted}", fetch, FETCH_SECONDS)
