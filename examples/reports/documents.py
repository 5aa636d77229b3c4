"""Real input: the licence and METADATA files of the packages that are installed where this runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import Distribution, distributions

__all__ = ["Document", "find"]

CHARS_MIN, CHARS_MAX = 400, 40_000
LICENCE = re.compile(r"(licen[cs]e|copying|notice)", re.IGNORECASE)
# What neither a text column nor a summary request can hold.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """One file of one package, cut to a size that a report needs."""

    package: str
    version: str
    kind: str
    file: str
    text: str = field(repr=False)

    @property
    def sha256(self) -> str:
        """Digest of the text."""
        return sha256(self.text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.package} {self.version} {self.file}"


def find(limit: int) -> list[Document]:
    """At most `limit` documents, equal texts once: the same ones in the same environment, spread over its packages."""
    found = {document.sha256: document for package in distributions() for document in _of(package)}
    chosen = [found[digest] for digest in sorted(found)[:limit]]
    return sorted(chosen, key=lambda d: d.name.lower())


def _of(package: Distribution) -> Iterator[Document]:
    for path in package.files or ():
        if ".dist-info" not in path.parts[0]:
            continue
        kind = "metadata" if path.name == "METADATA" else "licence" if LICENCE.search(path.name) else None
        if kind is None:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        text = UNSTORABLE.sub("", text)[:CHARS_MAX]
        if len(text) >= CHARS_MIN:
            yield Document(package.name, package.version, kind, path.name, text)
