"""Search in a corpus: the numbers of BM25, what an answer holds, and what is wrong with a corpus."""

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.rollout.environments.tools import search
from unirl.rollout.environments.tools.base import ToolError
from unirl.rollout.environments.tools.bm25 import BM25, words
from unirl.rollout.environments.tools.corpus import Document, read_corpus
from unirl.rollout.environments.tools.search import CorpusSearch, excerpt
from unirl.types.errors import ConfigError, DataError

TEXTS = ["the cat sat", "the dog sat on the cat", "a bird"]


def test_scores_are_those_of_a_calculation_by_hand():
    # 3 documents of 3, 6 and 2 words, 11/3 on average. "cat" is in two: idf = ln(1 + 1.5 / 2.5) = 0.47000363.
    # 1.2 * (0.25 + 0.75 * 3 / (11/3)) = 1.03636364 and for 6 words 1.77272727.
    # 0.47000363 * 2.2 / 2.03636364 = 0.50777178 and 0.47000363 * 2.2 / 2.77272727 = 0.37292091.
    index = BM25(TEXTS, k1=1.2, b=0.75)
    assert index.best("cat", 3) == [(0, pytest.approx(0.50777178)), (1, pytest.approx(0.37292091))]
    # "the" twice in six words: 0.47000363 * 2 * 2.2 / 3.77272727 = 0.54814881, above 0.50777178 once in three.
    assert index.best("the", 3) == [(1, pytest.approx(0.54814881)), (0, pytest.approx(0.50777178))]
    # "bird" is in one of three: ln(1 + 2.5 / 1.5) = 0.98082925; 1.2 * (0.25 + 0.75 * 2 / (11/3)) = 0.79090909.
    assert index.best("Bird, cat?", 1) == [(2, pytest.approx(0.98082925 * 2.2 / 1.79090909))]
    assert index.best("cat cat", 1)[0][1] == pytest.approx(2 * 0.50777178)
    assert index.best("horse", 3) == []


def by_definition(texts, query, k1, b):
    """The sum of the formula, for each document, without an index."""
    bags = [words(text) for text in texts]
    average = sum(map(len, bags)) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in words(query):
            num_with = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - num_with + 0.5) / (num_with + 0.5))
            tf = bag.count(word)
            score += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(bag) / average)) if tf else 0.0
        scores.append(score)
    return scores


@given(
    st.lists(st.text("ab c", min_size=1), min_size=1, max_size=6).filter(lambda texts: any(map(words, texts))),
    st.text("ab c", max_size=8),
    st.floats(0, 3),
    st.floats(0, 1),
)
def test_scores_are_the_formula(texts, query, k1, b):
    expected = by_definition(texts, query, k1, b)
    found = BM25(texts, k1=k1, b=b).best(query, len(texts))
    assert [score for _, score in found] == pytest.approx(sorted((s for s in expected if s > 0), reverse=True))
    assert all(score == pytest.approx(expected[number]) for number, score in found)


def test_equal_documents_are_found_in_their_order_and_empty_ones_never():
    assert [number for number, _ in BM25(["x", "", "x", "x"], k1=1.2, b=0.75).best("x", 2)] == [0, 2]
    assert BM25(["", ""], k1=1.2, b=0.75).best("x", 2) == []


def test_words_have_no_capitals_and_characters_of_scripts_without_spaces_stand_alone():
    assert words("The Stra\u00dfe, 3.5x_y!") == ["the", "strasse", "3", "5x_y"]
    assert words("\u5317\u4eac Tower") == ["\u5317", "\u4eac", "tower"]


@pytest.fixture
def corpus(tmp_path):
    rows = [
        {"id": "a", "title": "Cats", "text": "A cat sits.", "source": "left out"},
        {"id": "b", "title": "Dogs", "text": "A dog barks."},
        {"id": "c", "title": "Birds", "text": "word " * 300 + "the eagle flies " + "word " * 300},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_an_answer_has_the_best_documents_with_the_part_that_fits(corpus):
    tool = pickle.loads(pickle.dumps(CorpusSearch(corpus=str(corpus), num_results=2, max_chars=60)))
    assert tool({"query": "cats"}, {}) == "[a] Cats\nA cat sits."
    first, second = tool({"query": "eagle dog"}, {}).split("\n\n")
    assert first == "[b] Dogs\nA dog barks."
    head, text = second.split("\n")
    assert head == "[c] Birds" and "the eagle" in text and len(text) <= 60 + len("... ") + len(" ...")
    with pytest.raises(ToolError, match="no document has a word of the query"):
        tool({"query": "??"}, {})
    with pytest.raises(ToolError, match="1001 characters; at most 1000"):
        tool({"query": "x" * 1001}, {})


@given(st.text("ab \n", max_size=200), st.integers(1, 50))
def test_a_part_is_bounded_and_of_the_text(text, max_chars):
    part = excerpt(text, frozenset({"a"}), max_chars)
    assert part.removeprefix("... ").removesuffix(" ...").strip() in text
    assert len(part) <= max_chars + 8


def test_the_index_is_built_once_in_a_process(corpus, monkeypatch):
    read = []
    monkeypatch.setattr(search, "read_corpus", lambda path: read.append(path) or read_corpus(path))
    for _ in range(3):
        CorpusSearch(corpus=str(corpus))({"query": "cat"}, {})
    assert read == [corpus]


def test_a_folder_of_texts_is_a_corpus(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "big_cats.txt").write_text("lions")
    (tmp_path / "a.md").write_text("# A")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert read_corpus(tmp_path) == [Document("a.md", "a", "# A"), Document("deep/big_cats.txt", "big cats", "lions")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"id": "a", "title": "", "text": ""}\n{"id"', r":2: not JSON: "),
        (b"[" * 100_000, r":1: nested too deeply"),
        (b'\n{"id": "a", "title": ""}', r":2: 'text' is missing\. Write a text\."),
        (b'{"id": 1, "title": "", "text": ""}', r":1: 'id' is a int"),
        (b"[]", r":1: a list\. Write an object with id, title, text"),
        (b'{"id": "a", "title": "", "text": ""}\n' * 2, r":2: the id 'a' is there a second time"),
        (b"\n\xff", r":2: not UTF-8 text: byte 0xff"),
        (b"\n", r": no line\. A corpus needs a document"),
    ],
)
def test_what_is_wrong_with_a_corpus_has_its_line(tmp_path, text, reason):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=f"corpus.jsonl{reason}"):
        read_corpus(path)


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no \.md or \.txt file"):
        read_corpus(tmp_path / "empty")
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"search.corpus = .*nowhere: there is no such"):
        CorpusSearch(corpus=str(tmp_path / "nowhere"))
