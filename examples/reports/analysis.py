"""The real work: readability, word statistics, and the licence family, from the text alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Analysis", "analyse", "licence_family", "reading_ease", "syllables"]

WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
SENTENCE_END = re.compile(r"[.!?:;](?:\s|$)|\n\s*\n")
VOWELS = re.compile(r"[aeiouy]+")
COMMON = frozenset(
    [
        "the",
        "of",
        "and",
        "to",
        "in",
        "or",
        "a",
        "is",
        "for",
        "any",
        "this",
        "that",
        "by",
        "with",
        "as",
        "be",
        "on",
        "not",
        "are",
        "it",
        "you",
        "an",
        "such",
        "from",
        "all",
        "shall",
        "may",
        "under",
        "if",
        "without",
        "your",
        "at",
        "no",
        "which",
        "other",
        "its",
        "have",
        "will",
        "was",
        "has",
        "can",
        "these",
    ]
)
# Every phrase of a family must occur; the order does not matter, several families may be found.
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("MIT", ("permission is hereby granted, free of charge", "without restriction")),
    ("BSD", ("redistribution and use in source and binary forms",)),
    ("Apache-2.0", ("apache license", "version 2.0")),
    ("MPL-2.0", ("mozilla public license",)),
    ("LGPL", ("gnu lesser general public license",)),
    ("GPL", ("gnu general public license",)),
    ("PSF", ("python software foundation license",)),
    ("ISC", ("permission to use, copy, modify, and/or distribute this software",)),
    ("Unlicense", ("this is free and unencumbered software",)),
)
DECLARED = re.compile(
    r"^License(?:-Expression)?: *(\S[^\n]{0,60})$|^Classifier: License :: .*:: ([^\n]+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a report says of a text."""

    words: int
    distinct_words: int
    sentences: int
    syllables: int
    reading_ease: float
    family: str
    frequent: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it, for staging."""
        return {**asdict(self), "frequent": list(self.frequent)}

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Analysis:
        """What `plain` gave."""
        members: dict[str, Any] = {**value, "frequent": tuple(value["frequent"])}
        return cls(**members)


def analyse(text: str) -> Analysis:
    """Statistics of a whole text; an empty one has zeroes."""
    words = [word.lower() for word in WORD.findall(text)]
    sentences = max(1, len(SENTENCE_END.findall(text))) if words else 0
    total = sum(map(syllables, words))
    frequent = Counter(word for word in words if word not in COMMON and len(word) > 2).most_common(5)
    return Analysis(
        words=len(words),
        distinct_words=len(set(words)),
        sentences=sentences,
        syllables=total,
        reading_ease=reading_ease(len(words), sentences, total),
        family=licence_family(text),
        frequent=tuple(word for word, _ in frequent),
    )


def reading_ease(words: int, sentences: int, syllable_count: int) -> float:
    """Flesch reading ease: 60 to 70 is plain English, legal texts are often below 20, and it may be negative."""
    if words == 0 or sentences == 0:
        return 0.0
    return round(206.835 - 1.015 * (words / sentences) - 84.6 * (syllable_count / words), 1)


def syllables(word: str) -> int:
    """Groups of vowels, a silent final e not counted, at least one."""
    found = len(VOWELS.findall(word.lower()))
    if word.endswith("e") and not word.endswith(("le", "ee")) and found > 1:
        found -= 1
    return max(1, found)


def licence_family(text: str) -> str:
    """By what the text grants; for metadata, by what it declares; several are joined by a plus."""
    flat = " ".join(text.lower().split())
    found = [name for name, phrases in FAMILIES if all(phrase in flat for phrase in phrases)]
    if "LGPL" in found and "GPL" in found:
        found.remove("GPL")
    if found:
        return " + ".join(found)
    declared = DECLARED.search(text)
    return f"declares {(declared[1] or declared[2]).strip()}" if declared else "unknown"
