"""Text for the language models: the reference that Python ships for its own `help()`, about 700 KB of English."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np

VOCABULARY = 128  # ASCII; what is outside becomes a question mark


@functools.cache
def corpus() -> np.ndarray:
    """The whole text as character codes, int64 [characters]."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)


def windows(batch: int, length: int, count: int, seed: int, *, train: bool) -> Iterator[np.ndarray]:
    """Yield `count` batches of random windows, int64 [batch, length]; the last tenth of the text is held out."""
    codes = corpus()
    border = len(codes) * 9 // 10
    codes = codes[:border] if train else codes[border:]
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(0, len(codes) - length, batch)
        yield np.stack([codes[s : s + length] for s in starts])


def decode(codes: np.ndarray) -> str:
    """The characters of `codes`, int64 [characters], as a string."""
    return bytes(codes.astype(np.uint8)).decode("ascii")


@functools.cache
def sentences(longest: int = 48) -> list[list[str]]:
    """The sentences of the text, as lists of words in lower case and of signs, each of 4 to `longest` of them.

    Tables and program listings are left out: they are indented by more than the text is, or end without a full stop.
    """
    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics[name] for name in sorted(topics)))
    prose = [" ".join(p.split()) for p in paragraphs if not p.startswith(" " * 4) and re.search(r"[.!?]\s*$", p)]
    found = [s for p in prose for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", p)]
    words = [re.findall(r"[a-z]+|[^\sa-z]", s.lower()) for s in found]
    return [w for w in words if 4 <= len(w) <= longest]


@functools.cache
def words(most: int) -> tuple[np.ndarray, list[str]]:
    """The sentences as codes of words, int64 [words], and the `most` commonest words by code; `<unk>` is any other."""
    spoken = [word for sentence in sentences() for word in [*sentence, "<eos>"]]
    names, counts = np.unique(spoken, return_counts=True)
    known = ["<unk>", *map(str, names[np.argsort(-counts, kind="stable")[: most - 1]])]
    places = {word: place for place, word in enumerate(known)}
    return np.array([places.get(word, 0) for word in spoken]), known
