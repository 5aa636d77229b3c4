"""Databases for single tests, as users of the test kit have them."""

from fencepost.operate.testing.databases import Database, Databases

__all__ = ["Database", "Databases"]
