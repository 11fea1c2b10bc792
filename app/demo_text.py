"""What the demo reads and asks: a document, questions about it, and a chat of several turns."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvtide.core.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = re.compile(r" ?\w+|\s|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `follows`: it goes on from the prompt and answer before it."""

    title: str
    question: str
    follows: bool = False


STORY = (
    Turn("question 1", "What is this text, and who wrote it?"),
    Turn("question 2", "Which of its rules are about money?"),
    Turn("question 3", "What does it forbid, and whom?"),
    Turn("chat turn 1", "Let us talk about the text. What is its first part about?"),
    Turn("chat turn 2", "And how does the next part differ from that one?", follows=True),
    Turn("chat turn 3", "Thank you. Sum up both in one sentence.", follows=True),
    Turn("question 1 again", "What is this text, and who wrote it?"),
)


class Tokenizer(Protocol):
    """Text to token ids and back. `start`: what a model wants in front of every text."""

    start: list[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """The text of these ids."""


class PieceTokenizer:
    """A tokenizer for models that have none: bytes, and the pieces that are used most.

    Ids below 256 are bytes, so that every text has ids; the others are whole words with the
    space before them: those of the story's questions, then the most frequent of the text. The
    same text and number of pieces give the same ids everywhere.
    """

    def __init__(self, text: str, pieces: int) -> None:
        questions = dict.fromkeys(_words("".join(question_text(turn) for turn in STORY)))
        counts = Counter(word for word in _words(text) if word not in questions)
        # Equally frequent words in the order of the alphabet, not of their appearance.
        by_use = sorted(counts, key=lambda word: (-counts[word], word))
        ordered = [*questions, *by_use][:pieces]
        self.start: list[int] = []
        self._ids = {word: 256 + number for number, word in enumerate(ordered)}
        self._bytes = [bytes([value]) for value in range(256)] + [word.encode() for word in ordered]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            known = self._ids.get(piece)
            ids.extend(piece.encode() if known is None else (known,))
        return ids

    def decode(self, ids: list[int]) -> str:
        # A random model also says ids that stand for nothing.
        known = (self._bytes[number] for number in ids if number < len(self._bytes))
        return b"".join(known).decode(errors="replace")


class ModelTokenizer:
    """A transformers tokenizer behind the two verbs that the demo needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        first = tokenizer.bos_token_id
        self.start: list[int] = [] if first is None else [first]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


def read_document(path: Path | None) -> str:
    """The caller's file, or the text that is shipped. Raises `OSError`, `InvalidRequest`."""
    if path is None:
        return resources.files("kvtide.app.data").joinpath("constitution.txt").read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise InvalidRequest(f"{path} is empty: the demo needs a text to read")
    return text


def question_text(turn: Turn) -> str:
    """How a question stands behind the document or the chat so far."""
    return f"\n\nQuestion: {turn.question}\n\nAnswer:"


def _words(text: str) -> list[str]:
    """The pieces of a text that are more than a byte."""
    return [piece for piece in _PIECE.findall(text) if len(piece.encode()) > 1]
