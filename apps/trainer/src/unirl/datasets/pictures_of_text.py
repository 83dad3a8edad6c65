"""Prompts of images that others have collected: PickScore's, HPDv2's, WISE's, and Pick-a-Pic's pairs."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.datasets.captioned import PAIR_COLUMNS, pick_a_pic, required_text, square
from unirl.datasets.github import GitHubRepository
from unirl.datasets.hub import HubDataset
from unirl.datasets.records import Files, Output, PromptSet, PublishedFile, Row, both_splits
from unirl.datasets.splitting import distinct, first_by_hash, is_held_out

PICKSCORE_TRAIN, PICKSCORE_TEST = "dataset/pickscore/train.txt", "dataset/pickscore/test.txt"


def _lines(files: Files, path: str) -> Iterator[Row]:
    prompts = (text for _, text in files.rows(path))
    return ({"prompt": prompt} for prompt in distinct(prompts, str))


PICKSCORE = PromptSet(
    name="pickscore",
    what="prompts of Pick-a-Pic users, as Flow-GRPO splits them",
    made="copied, without repeats",
    sources=(
        GitHubRepository(
            name="yifan123/flow_grpo",
            revision="c7bb5fee2ef663eee08393759c8cb8a0e027f5e3",
            license="MIT",
            files=(
                PublishedFile(PICKSCORE_TRAIN),
                PublishedFile(
                    PICKSCORE_TEST,
                    num_rows=2048,
                    sha256="d75c025fa451866e70f7e36243f7cdd93095523cb51f5f9651f2ce3236d20262",
                ),
            ),
        ),
    ),
    outputs=(
        Output(
            split="train",
            file="train.txt",
            rows=lambda files: _lines(files, PICKSCORE_TRAIN),
            reads=(PICKSCORE_TRAIN,),
        ),
        Output(
            split="test",
            file="test.txt",
            rows=lambda files: _lines(files, PICKSCORE_TEST),
            reads=(PICKSCORE_TEST,),
            num_rows=2048,
        ),
    ),
)

HPDV2_TRAIN = "train.json"
HPDV2_STYLES = {
    "benchmark/anime.json": "6b38a479cc6f899866e9b7a8bf91f096b4afc6883b95275a61891327182b14ae",
    "benchmark/concept-art.json": "530d057deafcb82c581e9d1be2ffcb98828fe99f0b54257414d2ab8a5cf2b83e",
    "benchmark/paintings.json": "6570d39467e08b24b64e5b8a4177b0f61c525631121dc5a91fe2ab956eab4d5f",
    "benchmark/photo.json": "92a3c9a0f743f66eb87bd112cdda830d6bdb4c073c86021d53b74001fcb18052",
}
"""The benchmark's prompts by style, 800 each."""
HPDV2_HELD_OUT = 100
"""Prompts per style."""


def _hpdv2_benchmark(files: Files) -> list[str]:
    return list(distinct((text for path in HPDV2_STYLES for _, text in files.rows(path)), str))


def _hpdv2_train(files: Files) -> Iterator[Row]:
    """Prompts of the rated training images that the benchmark does not ask for."""
    held_out = set(_hpdv2_benchmark(files))
    prompts = (required_text(row["prompt"], where) for where, row in files.rows(HPDV2_TRAIN, ("prompt",)))
    return ({"prompt": prompt} for prompt in distinct(prompts, str) if prompt not in held_out)


def _hpdv2_test(files: Files) -> Iterator[Row]:
    known: set[str] = set()
    for path in HPDV2_STYLES:
        prompts = [text for _, text in files.rows(path) if text not in known]
        chosen = first_by_hash(dict.fromkeys(prompts), HPDV2_HELD_OUT, str)
        known.update(prompts)
        yield from ({"prompt": prompt} for prompt in chosen)


HPDV2 = PromptSet(
    name="hpdv2",
    what="prompts of HPDv2 to train on, 100 of each style of its benchmark to judge by",
    made="without repeats, and without the benchmark's prompts in the training file; those to judge by chosen by hash",
    sources=(
        HubDataset(
            name="ymhao/HPDv2",
            revision="main",
            license="Apache-2.0",
            files=(PublishedFile(HPDV2_TRAIN),),
        ),
        HubDataset(
            name="zhwang/HPDv2",
            revision="b9517430f34b1080d4f741118d2a440155a165cd",
            license="Apache-2.0",
            files=tuple(PublishedFile(path, num_rows=800, sha256=digest) for path, digest in HPDV2_STYLES.items()),
        ),
    ),
    outputs=(
        Output(split="train", file="train.txt", rows=_hpdv2_train, reads=(HPDV2_TRAIN, *HPDV2_STYLES)),
        Output(split="test", file="test.txt", rows=_hpdv2_test, reads=tuple(HPDV2_STYLES), num_rows=400),
    ),
)

WISE_FILES = {
    "data/cultural_common_sense.json": 400,
    "data/spatio-temporal_reasoning.json": 300,
    "data/natural_science.json": 300,
}
"""Files of WISE and their prompts."""
WISE_HELD_OUT = 0.2


def _wise(files: Files, *, held_out: bool) -> Iterator[Row]:
    """Rows with the explanation that `WISEScorer` shows its judge."""
    columns = ("Prompt", "Explanation", "Category", "Subcategory")
    rows = (
        {
            "prompt": required_text(row["Prompt"], where),
            "explanation": required_text(row["Explanation"], where),
            "category": str(row["Category"]),
            "subcategory": str(row["Subcategory"]),
        }
        for path in WISE_FILES
        for where, row in files.rows(path, columns)
    )
    for row in distinct(rows, lambda row: row["prompt"]):
        if is_held_out(row["prompt"], WISE_HELD_OUT) == held_out:
            yield row


WISE = PromptSet(
    name="wise",
    what="prompts that need knowledge of the world, each with what it means",
    made="a fifth held out by hash; a model trained on the rest is no longer comparable on the benchmark as a whole",
    sources=(
        GitHubRepository(
            name="PKU-YuanGroup/WISE",
            revision="0382b252d7f65bd18aba94a7e1af326c340e8327",
            license="see the repository",
            files=tuple(PublishedFile(path, num_rows=num_rows) for path, num_rows in WISE_FILES.items()),
        ),
    ),
    outputs=both_splits(_wise, suffix=".jsonl", reads=tuple(WISE_FILES)),
)

PAIRS = "data/train-0000?-of-*.parquet"
"""Ten of 645 files, about half a gigabyte each."""
PAIR_SIZE = 512
"""Pixels of a side, as the recipe has them."""


def _pairs(files: Files) -> Iterator[Row]:
    """Chosen image, then rejected; ties are left out."""
    for where, row in files.rows(PAIRS, PAIR_COLUMNS):
        if row["label_0"] == row["label_1"]:
            continue
        names = ("jpg_0", "jpg_1") if row["label_0"] > row["label_1"] else ("jpg_1", "jpg_0")
        images = [square(row[name], PAIR_SIZE, f"{where}: {name}") for name in names]
        yield {"prompt": required_text(row["caption"], where), "images": images, "scores": [1, 0]}


PREFERENCES = PromptSet(
    name="preferences",
    what="pairs of Pick-a-Pic v2, chosen before rejected, for Diffusion-DPO",
    made=f"without ties, images cropped to a square of {PAIR_SIZE} pixels; the first ten files of 645",
    sources=(pick_a_pic(PAIRS),),
    outputs=(Output(split="train", file="train.jsonl", rows=_pairs, reads=(PAIRS,)),),
)
