"""Where the sources say `Crash here:`: every label, with the statement that it stands before."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fencepost.relay import sidecar
from fencepost.schemas import migrate

RELAY = Path(sidecar.__file__).parent
FUNCTIONS = Path(migrate.__file__).parent / "sql" / "functions" / "relay"

WORDS = "Crash here"
LABEL = re.compile(r"^\s*(?:#|--) Crash here: \[([A-Z][0-9]?)\] \S")
FUNCTION = re.compile(r"FUNCTION (fencepost\.\w+)\(")
WRITE = re.compile(r"\s*(?:EXECUTE ')?(INSERT|UPDATE|DELETE|TRUNCATE)(?: INTO| FROM)? (fencepost\.\w+)?")


@dataclass(frozen=True, slots=True)
class Point:
    """One label: the line of the statement that follows it; in SQL the function around it and what is written there.

    `table` is empty where the statement names none.
    """

    label: str
    file: Path
    line: int
    function: str = ""
    event: str = ""
    table: str = ""


def points(python: Path = RELAY, functions: Path = FUNCTIONS) -> dict[str, Point]:
    """All labels of the relay and of its SQL functions; ValueError for one that is misspelt, doubled or stands nowhere."""
    found: dict[str, Point] = {}
    for point in [*_all(python, "*.py", _python), *_all(functions, "*.sql", _sql)]:
        if point.label in found:
            raise ValueError(f"[{point.label}] is in {point.file.name} and in {found[point.label].file.name}")
        found[point.label] = point
    return found


def _all(folder: Path, pattern: str, read: Callable[[str, Path, int, str], Point]) -> Iterator[Point]:
    for file in sorted(folder.rglob(pattern)):
        text = file.read_text()
        for number, line in enumerate(text.splitlines(), start=1):
            if WORDS in line:
                match = LABEL.match(line)
                if match is None:
                    raise ValueError(f"{file.name}:{number} is not a comment like: Crash here: [X] what is left")
                yield read(match[1], file, number, text)


def _python(label: str, file: Path, number: int, text: str) -> Point:
    lines = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)}
    return Point(label, file, min(line for line in lines if line > number))


def _sql(label: str, file: Path, number: int, text: str) -> Point:
    lines = text.splitlines()
    functions = [match[1] for line in lines[:number] if (match := FUNCTION.search(line))]
    write = WRITE.match(lines[number])
    if not functions or write is None:
        raise ValueError(f"[{label}] in {file.name} does not stand before a statement that writes")
    return Point(label, file, number + 1, functions[-1], write[1], write[2] or "")
