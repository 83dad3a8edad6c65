"""Search in a corpus of this machine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.tools.base import Tool, ToolError, one_text
from unirl.rollout.environments.tools.bm25 import BM25, words
from unirl.rollout.environments.tools.corpus import Document, read_corpus
from unirl.types.bounds import NonNegative, PositiveInt, UnitInterval, bounded
from unirl.types.errors import ConfigError

_MAX_QUERY_CHARS = 1000


@bounded("turns.environment.tools.search")
class CorpusSearch(Tool):
    """Answers the documents that fit a query best (BM25), each with its id, its title and the part of its text with
    most words of the query.

    corpus: JSON lines {"id", "title", "text"}, or a folder of .txt and .md files. Each process reads it once.
    num_results: documents per answer. max_chars: of the text of each. k1, b: of BM25.
    Raises ConfigError if the corpus is not there; what is wrong in it is found by `trainer check`.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.environments.tools.search_rules"
    description: str = "Search a collection of documents by words."
    parameters: Mapping[str, Any] = one_text("query", "a few words")  # Any: JSON
    deterministic: bool = True

    def __init__(
        self,
        *,
        corpus: str,
        num_results: PositiveInt = 3,
        max_chars: PositiveInt = 800,
        k1: NonNegative = 1.2,
        b: UnitInterval = 0.75,
    ) -> None:
        path = Path(corpus).expanduser()
        if not path.exists():
            raise ConfigError(f"turns.environment.tools.search.corpus = {corpus}: there is no such file or folder")
        self._path, self._k1, self._b = path.resolve(), k1, b
        self._num_results, self._max_chars = num_results, max_chars

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:
        """The best documents. Raises ToolError if none has a word of the query, or it is too long, and DataError if
        the corpus is broken."""
        query = arguments["query"]
        if len(query) > _MAX_QUERY_CHARS:
            raise ToolError(f"the query has {len(query)} characters; at most {_MAX_QUERY_CHARS}")
        documents, index = _indexed(self._path, self._k1, self._b)
        found = [documents[number] for number, _ in index.best(query, self._num_results)]
        if not found:
            raise ToolError("no document has a word of the query")
        asked = frozenset(words(query))
        return "\n\n".join(f"[{each.id}] {each.title}\n{excerpt(each.text, asked, self._max_chars)}" for each in found)


@functools.cache
def _indexed(path: Path, k1: float, b: float) -> tuple[list[Document], BM25]:
    documents = read_corpus(path)
    return documents, BM25([f"{each.title}\n{each.text}" for each in documents], k1=k1, b=b)


def excerpt(text: str, asked: frozenset[str], max_chars: int) -> str:
    """The first part of at most `max_chars` characters, begun at a word, that has most of the words asked
    for; dots stand for what is left out."""
    text = text.strip()
    if len(text) <= max_chars:
        return text
    tried = {text.rfind(" ", 0, at) + 1 for at in range(0, len(text), max(1, max_chars // 4))}
    begin = min(tried, key=lambda at: (-sum(word in asked for word in words(text[at : at + max_chars])), at))
    end = begin + max_chars
    return f"{'... ' if begin else ''}{text[begin:end].strip()}{' ...' if end < len(text) else ''}"
