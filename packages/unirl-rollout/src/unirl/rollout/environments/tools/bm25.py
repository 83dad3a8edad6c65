"""BM25: how well documents fit a query, by the words that they share."""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence

# Scripts without spaces: each character is a word.
_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+")


def words(text: str) -> list[str]:
    """Its words without regard to capitals, in order."""
    return _WORD.findall(text.casefold())


class BM25:
    """An index of documents.

    k1: how fast repetitions of a word count less; b: 0 to 1, how much long documents count less.
    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), equation 3.15, with
    idf = ln(1 + (N - n + 0.5) / (n + 0.5)), which is never negative, as Lucene has it.
    """

    def __init__(self, texts: Sequence[str], *, k1: float, b: float) -> None:
        self._k1 = k1
        self._postings: dict[str, tuple[array[int], array[int]]] = {}
        lengths = []
        for number, text in enumerate(texts):
            counts = Counter(words(text))
            lengths.append(counts.total())
            for word, count in counts.items():
                documents, frequencies = self._postings.setdefault(word, (array("L"), array("L")))
                documents.append(number)
                frequencies.append(count)
        average = sum(lengths) / len(texts) or 1.0
        self._length_terms = [k1 * (1 - b + b * length / average) for length in lengths]

    def best(self, query: str, num: int) -> list[tuple[int, float]]:
        """At most `num` (document, score above 0), the best first, equal ones by their order. A word of the query
        counts as often as it is there."""
        scores: dict[int, float] = {}
        for word in words(query):
            if word not in self._postings:
                continue
            documents, frequencies = self._postings[word]
            idf = math.log(1 + (len(self._length_terms) - len(documents) + 0.5) / (len(documents) + 0.5))
            for document, frequency in zip(documents, frequencies, strict=True):
                fit = frequency * (self._k1 + 1) / (frequency + self._length_terms[document])
                scores[document] = scores.get(document, 0.0) + idf * fit
        return heapq.nsmallest(num, scores.items(), key=lambda found: (-found[1], found[0]))
