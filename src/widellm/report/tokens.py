"""A text as the tokenizer cuts it: the piece that each token stands for, and what kind of token it is."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from widellm.errors import ConfigError, TextError

FIRST, WORD, PIECE, NUMBER, PUNCTUATION, SPACE, OTHER = KINDS_OF_TOKEN = (
    "first token",
    "whole word",
    "piece of a rare word",
    "number",
    "punctuation",
    "white space",
    "other",
)
"""A word that the tokenizer has no token of its own for comes in pieces: that is what "rare" means here."""


@dataclass(frozen=True)
class Tokens:
    """The first tokens of a text."""

    ids: list[int]
    pieces: list[str]
    """Joined, they are the text as far as it was taken; empty where a token is a further byte of one character."""
    kinds: list[str]
    """One of KINDS_OF_TOKEN each."""
    total: int
    """Tokens of the whole text, before it was cut."""

    @property
    def cut(self) -> bool:
        """Whether the text was longer than what was taken."""
        return self.total > len(self.ids)


def tokenise(tokenizer: Any, text: str, limit: int) -> Tokens:
    """The first `limit` tokens of `text`, without special tokens.

    Raises TextError when the text has fewer than two tokens, ConfigError when `limit` is less than two.
    """
    if limit < 2:
        raise ConfigError(f"a report needs at least 2 tokens, got a limit of {limit}")
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=bool(tokenizer.is_fast))
    ids = list(encoded["input_ids"])
    if len(ids) < 2:
        raise TextError(f"the text is too short: it has {len(ids)} token(s), a report needs at least 2")
    total, ids = len(ids), ids[:limit]
    if tokenizer.is_fast:
        spans = [(int(a), int(b)) for a, b in encoded["offset_mapping"][:limit]]
    else:  # without offsets, what each token decodes to has to do
        pieces = [tokenizer.decode([i]) for i in ids]
        text, spans, end = "".join(pieces), [], 0
        for piece in pieces:
            spans.append((end, end + len(piece)))
            end += len(piece)
    pieces, end = [], 0
    for _, stop in spans:
        pieces.append(text[end:stop])
        end = max(end, stop)
    kinds = [FIRST, *(kind_of(text, *span) for span in spans[1:])]
    return Tokens(ids, pieces, kinds, total)


def kind_of(text: str, start: int, stop: int) -> str:
    """The kind of the token that covers text[start:stop]; never FIRST, which only its place can tell."""
    surface = text[start:stop]
    core = surface.strip()
    if not core:
        return SPACE if surface else OTHER
    letters = [i for i, c in enumerate(surface) if c.isalpha()]
    if letters:
        first, last = start + letters[0], start + letters[-1]
        joined_before = first > 0 and text[first - 1].isalnum()
        joined_after = last + 1 < len(text) and last + 1 >= stop and text[last + 1].isalpha()
        return PIECE if joined_before or joined_after else WORD
    if any(c.isdigit() for c in core):
        return NUMBER
    if all(unicodedata.category(c)[0] == "P" or (c.isascii() and c.isprintable()) for c in core):
        return PUNCTUATION
    return OTHER
