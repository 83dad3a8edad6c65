"""The prompt-embedding cache: what it encodes, keeps, forgets and survives."""

from pathlib import Path

import torch

from unirl.models.embedding_cache import Embedding, EmbeddingCache, content_key


class Encoder:
    """Four floats a text; remembers what it was asked for."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str]) -> list[Embedding]:
        self.batches.append(texts)
        return [{"embeds": torch.full((4,), float(len(text)))} for text in texts]


def _lookup(cache: EmbeddingCache, encoder: Encoder, texts: list[str]) -> list[float]:
    keys = [content_key("test", text) for text in texts]
    rows = cache.lookup(keys, lambda part: encoder([texts[place] for place in part]), batch_size=2)
    return [row["embeds"][0].item() for row in rows]


def test_unique_unknown_texts_are_encoded_in_batches_and_gathered() -> None:
    cache, encoder = EmbeddingCache(), Encoder()
    assert _lookup(cache, encoder, ["a", "bb", "a", "ccc", "bb"]) == [1, 2, 1, 3, 2]
    assert encoder.batches == [["a", "bb"], ["ccc"]]
    assert _lookup(cache, encoder, ["ccc", "dddd"]) == [3, 4]
    assert encoder.batches[2:] == [["dddd"]]
    assert (cache.statistics.num_memory_hits, cache.statistics.num_misses) == (1, 4)
    assert cache.statistics.hit_fraction == 0.2


def test_a_folder_outlives_the_process_that_wrote_it(tmp_path: Path) -> None:
    _lookup(EmbeddingCache(tmp_path), Encoder(), ["a", "bb"])
    cache, encoder = EmbeddingCache(tmp_path), Encoder()
    assert _lookup(cache, encoder, ["bb", "a"]) == [2, 1]
    assert encoder.batches == [] and cache.statistics.num_disk_hits == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_a_damaged_file_is_encoded_again(tmp_path: Path) -> None:
    _lookup(EmbeddingCache(tmp_path), Encoder(), ["a"])
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:10])
    encoder = Encoder()
    assert _lookup(EmbeddingCache(tmp_path), encoder, ["a"]) == [1]
    assert encoder.batches == [["a"]]
    assert _lookup(EmbeddingCache(tmp_path), Encoder(), ["a"]) == [1]


def test_the_least_recently_used_leaves_memory_first(tmp_path: Path) -> None:
    """16 bytes an embedding: room for two. What left memory is still on disk, when there is one."""
    for folder in (None, tmp_path):
        cache, encoder = EmbeddingCache(folder, memory_bytes=32), Encoder()
        _lookup(cache, encoder, ["a"])
        _lookup(cache, encoder, ["bb"])
        _lookup(cache, encoder, ["a"])
        _lookup(cache, encoder, ["ccc"])
        assert _lookup(cache, encoder, ["a"]) == [1]
        assert cache.statistics.num_memory_hits == 2
        assert _lookup(cache, encoder, ["bb"]) == [2]
        assert len(encoder.batches) == (4 if folder is None else 3)


def test_a_batch_larger_than_memory_is_still_answered() -> None:
    assert _lookup(EmbeddingCache(memory_bytes=16), Encoder(), ["a", "bb", "ccc"]) == [1, 2, 3]


def test_a_cached_value_is_not_the_callers_tensor() -> None:
    cache = EmbeddingCache()
    mine = torch.ones(2)
    cache.put("key", {"embeds": mine})
    mine.zero_()
    stored = cache.get("key")
    assert stored is not None and stored["embeds"].tolist() == [1, 1]


def test_every_fact_changes_the_key() -> None:
    assert len({content_key("m", 16, "a"), content_key("m", 17, "a"), content_key("n", 16, "a"), content_key("m")}) == 4


def test_what_falls_out_of_memory_is_lost_without_a_folder_alone(tmp_path: Path) -> None:
    for folder, num_lost in ((None, 1), (tmp_path, 0)):
        cache = EmbeddingCache(folder, memory_bytes=2 * 16)
        _lookup(cache, Encoder(), ["a", "bb"])
        assert cache.statistics.num_lost == 0
        _lookup(cache, Encoder(), ["ccc"])
        assert cache.statistics.num_lost == num_lost
