"""The certificate that a service shows, written where only this service reads it."""

from dataclasses import dataclass, field
from pathlib import Path

from . import places


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate and key (PKCS #8), and the authority that it asks of its clients, all PEM."""

    authority: bytes
    chain: bytes
    key: bytes = field(repr=False)

    def write(self, folder: Path) -> "Files":
        """Writes the files for the plain user."""
        files = Files(folder / "authority.pem", folder / "chain.pem", folder / "key.pem", folder / "store.pem")
        contents = (self.authority, self.chain, self.key, self.key + self.chain)
        for path, content in zip((files.authority, files.chain, files.key, files.store), contents, strict=True):
            path.touch(0o600)
            path.write_bytes(content)
            places.hand_over(path)
        return files


@dataclass(frozen=True, slots=True)
class Files:
    """Where a service finds its certificate; `store` holds key and chain in one file."""

    authority: Path
    chain: Path
    key: Path
    store: Path
