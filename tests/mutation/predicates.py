"""Every predicate of an SQL function, removed in turn: read from the function's own text, whatever it says today.

Not a parser of SQL: it knows brackets, the words that end a condition, AND and OR, and the house style (key words in
capitals, everything else not).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

HEAD = re.compile(r"^CREATE OR REPLACE FUNCTION fencepost\.(\w+)\(", re.MULTILINE)
BODY = re.compile(r"\bAS (\$\w*\$)")
TOKEN = re.compile(
    r"(?P<comment>--[^\n]*)|(?P<dollar>\$[a-z_]*\$)|(?P<string>'(?:[^']|'')*')|(?P<word>\w+|\"[^\"]*\")|(?P<space>\s+)"
    r"|(?P<op>:=|::|<=|>=|<>|->>|->|\|\||!~|\.\.|.)",
    re.DOTALL,
)
# A condition begins behind one of these, or ends before one of them.
EDGES = frozenset(
    re.findall(
        r"\w+",
        """
WHERE ON WHEN THEN ELSE END IF ELSIF WHILE LOOP FROM JOIN LEFT CROSS INNER LATERAL ORDER GROUP LIMIT
FOR RETURNING UNION INTO SELECT SET USING HAVING VALUES AS BEGIN DECLARE PERFORM RETURN UPDATE
DELETE INSERT DO CASE CONTINUE EXIT FILTER OVER WITH STRICT QUERY DISTINCT EXECUTE OFFSET
""",
    )
) | {",", ";", ":="}
SITES = frozenset({"WHERE", "ON", "WHEN", "IF", "ELSIF", "WHILE", "HAVING"})
BRANCHES = frozenset({"WHEN", "IF", "ELSIF", "WHILE"})
LOCK = re.compile(r"FOR (?:NO KEY UPDATE|KEY SHARE|UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED)?\b")
GUARD = re.compile(r"PERFORM fencepost\.(?:_enter|_require_\w+|_fence)\(|LOCK TABLE ")
FENCED = re.compile(r"v_job := fencepost\._fence\([^;]*\);")
UNFENCED = (
    "SELECT j.* INTO v_job FROM fencepost.job AS j"
    " WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;"
)


LONG = 120


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard taken out. `apply` and `undo` are SQL for a database that is there; `key` stays while the guard's text does."""

    key: str
    file: str
    function: str
    line: int
    apply: str
    undo: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function as its file has it."""

    file: str
    name: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Edit:
    """Texts put in the place of others (begin, end, text), and what to call that."""

    what: str
    places: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    begin: int
    end: int


def functions(file: str, text: str) -> list[Function]:
    """The functions that a file creates."""
    found: list[Function] = []
    for head in HEAD.finditer(text):
        body = BODY.search(text, head.end())
        assert body is not None, f"{file}: {head[1]} has no body"
        end = text.index(f"{body[1]};", body.end()) + len(body[1]) + 1
        found.append(Function(file, head[1], text.count("\n", 0, head.start()) + 1, text[head.start() : end]))
    return found


def mutants(function: Function) -> list[Mutant]:
    """One for each predicate, lock and check of a function, and two for the function as a whole."""
    found: list[Mutant] = []
    seen: dict[str, int] = {}
    for edit in [*_edits(function.text), *_wholes(function.text)]:
        key = f"{function.name}: {edit.what}"
        seen[key] = seen.get(key, 0) + 1
        changed = _changed(function.text, edit)
        assert changed != function.text, key
        line = function.line + function.text.count("\n", 0, edit.places[0][0])
        key = key if seen[key] == 1 else f"{key} #{seen[key]}"
        found.append(Mutant(key, function.file, function.name, line, changed, function.text))
    return found


def conditions(text: str) -> list[tuple[str, str]]:
    """Every predicate of one condition removed: what to call it, and the condition without it."""
    reader = _Reader(text, 0)
    edits = _level(reader, 0, len(reader.tokens), "")
    return [(edit.what, _changed(text, edit)) for edit in edits]


def _changed(text: str, edit: Edit) -> str:
    for begin, end, new in sorted(edit.places, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


class _Reader:
    """The tokens of a body, and for each opening bracket where it closes. A quoted body inside reads like brackets."""

    def __init__(self, text: str, begin: int) -> None:
        self.text = text
        self.tokens: list[Token] = []
        self.closes: dict[int, int] = {}
        opened: list[int] = []
        for match in TOKEN.finditer(text, begin):
            if match.lastgroup in ("comment", "space"):
                continue
            token, at = match[0], len(self.tokens)
            if match.lastgroup == "dollar" and opened and self.tokens[opened[-1]].text == token or token == ")":
                self.closes[opened.pop()] = at
            elif token == "(" or match.lastgroup == "dollar":
                opened.append(at)
            self.tokens.append(Token(token, match.start(), match.end()))

    def text_of(self, lo: int, hi: int) -> str:
        """The text of these tokens."""
        return self.text[self.tokens[lo].begin : self.tokens[hi - 1].end]

    def said(self, lo: int, hi: int) -> str:
        """The same on one line, a long one without its middle."""
        line = " ".join(self.text_of(lo, hi).split())
        return line if len(line) <= LONG else f"{line[: LONG - 35]} ... {line[-30:]}"

    def place(self, lo: int, hi: int, new: str) -> tuple[int, int, str]:
        return self.tokens[lo].begin, self.tokens[hi - 1].end, new

    def word(self, at: int) -> str:
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def parts(self, lo: int, hi: int, separators: frozenset[str]) -> list[tuple[int, int]]:
        """The ranges between separators of this level; the AND of BETWEEN separates nothing."""
        ranges: list[tuple[int, int]] = []
        begin = at = lo
        between = False
        while at < hi:
            if at in self.closes:
                at = self.closes[at] + 1
                continue
            text = self.word(at)
            if text == "AND" and between:
                between = False
            elif text in separators:
                ranges.append((begin, at))
                begin = at + 1
            between = between or text == "BETWEEN"
            at += 1
        return [*ranges, (begin, hi)]


def _edits(text: str) -> Iterator[Edit]:
    body = BODY.search(text)
    assert body is not None
    reader = _Reader(text, body.end() - len(body[1]))
    yield from _level(reader, 1, reader.closes[0], "")
    for match in LOCK.finditer(text):
        yield Edit(f"no {match[0]}", ((match.start(), match.end(), ""),))
    for match in GUARD.finditer(text):
        end = text.index(";", match.start())
        called = " ".join(text[match.start() : end].split())
        yield Edit(f"no {called}", ((match.start(), end, "NULL"),))
    for match in FENCED.finditer(text):
        yield Edit("no fence", ((match.start(), match.end(), UNFENCED),))


def _level(reader: _Reader, lo: int, hi: int, site: str) -> Iterator[Edit]:
    begin = at = lo
    cases: list[bool] = []
    while at < hi:
        word = reader.word(at)
        if at in reader.closes:
            yield from _level(reader, at + 1, reader.closes[at], word)
            at = reader.closes[at] + 1
            continue
        if word in EDGES and not (word in ("FROM", "DISTINCT") and "DISTINCT" in (word, reader.word(at - 1))):
            yield from _condition(reader, begin, at, site)
            site, begin = word, at + 1
            if word == "CASE":
                cases.append(reader.word(at + 1) != "WHEN")
            elif word == "END" and cases and reader.word(at + 1) not in ("IF", "LOOP"):
                cases.pop()
            elif word == "WHEN" and cases and cases[-1]:
                site = "VALUE"
            elif word == "ON" and reader.word(at + 1) == "CONFLICT":
                site = ""
        at += 1
    yield from _condition(reader, begin, hi, site)


def _condition(reader: _Reader, lo: int, hi: int, site: str) -> Iterator[Edit]:
    if lo >= hi or reader.text_of(lo, hi) == "true":
        return
    if site == "VALUE":
        yield Edit(f"WHEN {reader.said(lo, hi)} never", (reader.place(lo, hi, "NULL"),))
        return
    terms = reader.parts(lo, hi, frozenset({"OR"}))
    joined = False
    for term in terms:
        factors = reader.parts(*term, frozenset({"AND"}))
        joined = joined or len(factors) > 1
        if len(factors) > 1:
            for factor in factors:
                yield Edit(f"{reader.said(*factor)} -> true", (reader.place(*factor, "true"),))
        if len(terms) > 1:
            yield Edit(f"{reader.said(*term)} -> false", (reader.place(*term, "false"),))
        for factor in factors:
            yield from _inside(reader, *factor)
    if site in BRANCHES:
        for value in ("false", "true"):
            yield Edit(f"{site} {reader.said(lo, hi)} -> {value}", (reader.place(lo, hi, value),))
    elif site in SITES and not joined and len(terms) == 1:
        yield Edit(f"{site} {reader.said(lo, hi)} -> true", (reader.place(lo, hi, "true"),))


def _inside(reader: _Reader, lo: int, hi: int) -> Iterator[Edit]:
    """What one comparison consists of: bounds, members of a list, columns of a row, the greater of two."""
    at = lo
    while at < hi:
        word = reader.word(at)
        if word == "BETWEEN":
            yield from _bounds(reader, lo, at, hi)
        elif word == "IN" and at + 1 in reader.closes:
            yield from _members(reader, at + 1)
        elif word == "greatest" and at + 1 in reader.closes:
            yield from _greatest(reader, at)
        elif word == "(":
            yield from _columns(reader, at)
        at = reader.closes.get(at, at) + 1


def _bounds(reader: _Reader, lo: int, at: int, hi: int) -> Iterator[Edit]:
    middle = at + 1
    while reader.word(middle) != "AND":
        middle = reader.closes.get(middle, middle) + 1
    no = reader.word(at - 1) == "NOT"
    begin = at - 1 if no else at
    low, high = reader.text_of(at + 1, middle), reader.text_of(middle + 1, hi)
    said = reader.said(lo, hi)
    yield Edit(f"{said} without its end", (reader.place(begin, hi, f"{'<' if no else '>='} {low}"),))
    yield Edit(f"{said} without its beginning", (reader.place(begin, hi, f"{'>' if no else '<='} {high}"),))


def _members(reader: _Reader, at: int) -> Iterator[Edit]:
    parts = reader.parts(at + 1, reader.closes[at], frozenset({","}))
    if len(parts) < 2 or any(hi - lo != 1 for lo, hi in parts):
        return
    said = reader.said(at - 2, reader.closes[at] + 1)
    for part in parts:
        kept = ", ".join(reader.text_of(*other) for other in parts if other != part)
        yield Edit(f"{said} without {reader.said(*part)}", (reader.place(at, reader.closes[at] + 1, f"({kept})"),))


def _greatest(reader: _Reader, at: int) -> Iterator[Edit]:
    parts = reader.parts(at + 2, reader.closes[at + 1], frozenset({","}))
    said = reader.said(at, reader.closes[at + 1] + 1)
    for part in parts:
        if len(parts) == 2:
            yield Edit(
                f"{said} -> {reader.said(*part)}",
                (reader.place(at, reader.closes[at + 1] + 1, reader.text_of(*part)),),
            )


def _columns(reader: _Reader, at: int) -> Iterator[Edit]:
    """A row compared with a row: each column left out of both."""
    end = reader.closes[at]
    other = end + 1
    while reader.word(other) in ("IS", "DISTINCT", "FROM", "=", "<>", "NOT"):
        other += 1
    if other == end + 1 or other not in reader.closes or reader.word(at - 1).islower():
        return
    left = reader.parts(at + 1, end, frozenset({","}))
    right = reader.parts(other + 1, reader.closes[other], frozenset({","}))
    if len(left) != len(right) or len(left) < 2:
        return
    for n, part in enumerate(left):
        places: list[tuple[int, int, str]] = []
        for opened, columns in ((at, left), (other, right)):
            kept = ", ".join(reader.text_of(*column) for m, column in enumerate(columns) if m != n)
            places.append(reader.place(opened, reader.closes[opened] + 1, f"ROW({kept})"))
        yield Edit(f"row comparison without {reader.said(*part)}", tuple(places))


def _wholes(text: str) -> Iterator[Edit]:
    """The function that refuses everything, and the one that does nothing."""
    body = BODY.search(text)
    assert body is not None
    begin = re.compile(r"^BEGIN\b", re.MULTILINE).search(text, body.end())
    if begin is None:
        return
    head = text[: body.start()]
    if re.search(r"RETURNS (void|TABLE|SETOF)", head) or "RETURNS" not in head:
        leave = "RETURN;"
    else:
        leave = "RETURN NEW;" if "RETURNS trigger" in head else "RETURN NULL;"
    refuse = "RAISE EXCEPTION USING ERRCODE = 'ZF020', MESSAGE = 'mutant', COLUMN = 'state';"
    if not _refuses_only(text[begin.end() :]):
        yield Edit("refuses everything", ((begin.end(), begin.end(), f"\n    {refuse}"),))
    yield Edit("does nothing", ((begin.end(), begin.end(), f"\n    {leave}"),))


def _refuses_only(body: str) -> bool:
    return re.match(r"\s*PERFORM fencepost\._refuse\(", body) is not None
