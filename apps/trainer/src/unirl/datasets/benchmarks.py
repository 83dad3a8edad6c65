"""Published benchmarks whole, to judge by: nothing of them is held out or to train on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.datasets.captioned import required_text
from unirl.datasets.github import GitHubRepository
from unirl.datasets.hub import HubDataset
from unirl.datasets.pictures_of_text import HPDV2_STYLES, WISE_FILES
from unirl.datasets.reading import require_columns
from unirl.datasets.records import Files, Output, PromptSet, PublishedFile, Repository, Row
from unirl.datasets.splitting import several_drawn
from unirl.types.errors import DataError, as_sentence

GENEVAL_METADATA = "prompts/evaluation_metadata.jsonl"


def _geneval(files: Files) -> Iterator[Row]:
    """The published rows, with the task as category."""
    for where, row in files.rows(GENEVAL_METADATA):
        require_columns(row, ("tag", "include", "prompt"), where)
        yield {**row, "category": row["tag"]}


def _benchmark(
    name: str, what: str, made: str, sources: tuple[Repository, ...], rows: Any, *, suffix: str = ".jsonl"
) -> PromptSet:
    """A set with one file. rows: see `Output.rows`."""
    reads = tuple(file.path for source in sources for file in source.files)
    output = Output(split="test", file=f"test{suffix}", rows=rows, reads=reads)
    return PromptSet(name=name, what=what, made=made, sources=sources, outputs=(output,))


GENEVAL_BENCHMARK = _benchmark(
    "geneval_benchmark",
    "the 553 prompts of GenEval with what its scorer asks for",
    "as published; the task is the category",
    (
        GitHubRepository(
            name="djghosh13/geneval",
            revision="main",
            license="MIT",
            files=(PublishedFile(GENEVAL_METADATA, num_rows=553),),
        ),
    ),
    _geneval,
)

GENEVAL2_DATA = "geneval2_data.jsonl"


def _geneval2(files: Files) -> Iterator[Row]:
    """The published rows, with the number of atoms as category."""
    for where, row in files.rows(GENEVAL2_DATA):
        require_columns(row, ("prompt", "atom_count", "vqa_list", "skills"), where)
        yield {**row, "category": f"{row['atom_count']} atoms"}


GENEVAL2 = _benchmark(
    "geneval2",
    "the 800 prompts of GenEval 2 with a question per atom",
    "as published; the number of atoms is the category",
    (
        GitHubRepository(
            name="facebookresearch/GenEval2",
            revision="main",
            license="CC-BY-NC-4.0",
            files=(PublishedFile(GENEVAL2_DATA, num_rows=800),),
        ),
    ),
    _geneval2,
)


def _hpdv2(files: Files) -> Iterator[Row]:
    """All prompts of the four styles, repeats included, in their order."""
    for path in HPDV2_STYLES:
        style = Path(path).stem
        for number, (where, text) in enumerate(files.rows(path)):
            yield {"prompt": required_text(text, where), "category": style, "number": number}


HPDV2_BENCHMARK = _benchmark(
    "hpdv2_benchmark",
    "the 3,200 prompts of the HPDv2 benchmark",
    "as published; the style is the category",
    (
        HubDataset(
            name="zhwang/HPDv2",
            revision="b9517430f34b1080d4f741118d2a440155a165cd",
            license="Apache-2.0",
            files=tuple(PublishedFile(path, num_rows=800, sha256=digest) for path, digest in HPDV2_STYLES.items()),
        ),
    ),
    _hpdv2,
)

WISE_TIME = ("Longitudinal time", "Horizontal time")
"""Subcategories of spatio-temporal reasoning that are about time; the others are about space."""
WISE_SCIENCES = {"biology": "biology", "physics": "physics", "chemistry": "chemistry"}
WISE_SCIENCE_SIZE = 100
"""Prompts of each science, in the order of WISE_SCIENCES."""


def _wise(files: Files) -> Iterator[Row]:
    """Rows with their number and the category of the published summary."""
    for path in WISE_FILES:
        for place, (where, row) in enumerate(files.rows(path)):
            require_columns(row, ("Prompt", "Explanation", "Category", "Subcategory", "prompt_id"), where)
            yield {
                "prompt": required_text(row["Prompt"], where),
                "explanation": required_text(row["Explanation"], where),
                "category": _wise_category(path, place, str(row["Subcategory"])),
                "subcategory": str(row["Subcategory"]),
                "number": row["prompt_id"],
            }


def _wise_category(path: str, place: int, subcategory: str) -> str:
    if "cultural" in path:
        return "cultural"
    if "spatio" in path:
        return "time" if subcategory in WISE_TIME else "space"
    return list(WISE_SCIENCES)[min(place // WISE_SCIENCE_SIZE, len(WISE_SCIENCES) - 1)]


WISE_BENCHMARK = _benchmark(
    "wise_benchmark",
    "the 1,000 prompts of WISE, each with what it means",
    "as published; the sciences by the order of their file, 100 prompts each",
    (
        GitHubRepository(
            name="PKU-YuanGroup/WISE",
            revision="0382b252d7f65bd18aba94a7e1af326c340e8327",
            license="see the repository",
            files=tuple(PublishedFile(path, num_rows=num_rows) for path, num_rows in WISE_FILES.items()),
        ),
    ),
    _wise,
)

PARTI = "PartiPrompts.tsv"


def _parti(files: Files) -> Iterator[Row]:
    for where, row in _table(files, PARTI, ("Prompt", "Category", "Challenge"), delimiter="\t"):
        yield {
            "prompt": required_text(row["Prompt"], where),
            "category": row["Category"],
            "challenge": row["Challenge"],
        }


def _table(files: Files, path: str, columns: tuple[str, ...], *, delimiter: str = ",") -> list[tuple[str, Any]]:
    """(place, row) of a file with a header. Raises DataError."""
    file = files.only(path)
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    try:
        with file.open(encoding="utf-8", newline="") as text:
            reader = csv.DictReader(text, delimiter=delimiter, quoting=quoting)
            rows = [(f"{file}:row {number}", row) for number, row in enumerate(reader, start=1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read as a table: {as_sentence(error)} Fetch the file again.") from error
    for where, row in rows:
        require_columns(row, columns, where)
    files.require_rows(path, len(rows))
    return rows


PARTIPROMPTS = _benchmark(
    "partiprompts",
    "the 1,632 prompts of PartiPrompts (P2) with category and challenge",
    "as published",
    (
        GitHubRepository(
            name="google-research/parti",
            revision="2c99f6652cbc7f0d0441aa91f4c7e7055bcb0071",
            license="Apache-2.0",
            files=(PublishedFile(PARTI, num_rows=1632),),
        ),
    ),
    _parti,
)

DPG_TABLE = "dpg_bench/dpg_bench.csv"
DPG_COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")


def _dpg(files: Files) -> Iterator[Row]:
    """A row per prompt, with its questions. The published script leaves out the first question of all; this does not.

    Question 0 in a dependency stands for none.
    """
    prompts: dict[str, dict[str, Any]] = {}
    for where, row in _table(files, DPG_TABLE, DPG_COLUMNS):
        try:
            number = int(row["proposition_id"])
            parents = [int(part) for part in row["dependency"].split(",")]
        except ValueError as error:
            raise DataError(f"{where}: proposition_id and dependency must be numbers: {as_sentence(error)}") from error
        own = prompts.setdefault(
            row["item_id"], {"prompt": required_text(row["text"], where), "item": row["item_id"], "questions": []}
        )
        own["questions"].append(
            {
                "id": number,
                "question": required_text(row["question_natural_language"], where),
                "parents": [parent for parent in parents if parent != 0],
                "category": row["tuple"].partition("(")[0].strip(),
            }
        )
    yield from prompts.values()


DPG = _benchmark(
    "dpg",
    "the 1,065 dense prompts of DPG-Bench with their questions",
    "a row per prompt; questions with what they depend on",
    (
        GitHubRepository(
            name="TencentQQGYLab/ELLA",
            revision="025f650e9b36b9603d606042635d98da09e870de",
            license="see the repository",
            files=(PublishedFile(DPG_TABLE),),
        ),
    ),
    _dpg,
)

MATH500_FILE = "test.jsonl"


def _math500(files: Files) -> Iterator[Row]:
    for where, row in files.rows(MATH500_FILE):
        require_columns(row, ("problem", "answer", "subject", "level"), where)
        yield {
            "prompt": required_text(row["problem"], where),
            "answer": required_text(row["answer"], where),
            "category": row["subject"],
            "level": row["level"],
        }


MATH500 = _benchmark(
    "math500",
    "500 problems of MATH, to judge mathematics by",
    "problem and answer; the subject is the category",
    (
        HubDataset(
            name="HuggingFaceH4/MATH-500",
            revision="main",
            license="see the repository",
            files=(PublishedFile(MATH500_FILE, num_rows=500),),
        ),
    ),
    _math500,
)

GPQA_FILE = "gpqa_diamond.csv"
GPQA_RIGHT, GPQA_WRONG = "Correct Answer", tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))


def _gpqa(files: Files) -> Iterator[Row]:
    """The answers in an order by the hash of the question, which is the same on every machine."""
    columns = ("Question", GPQA_RIGHT, *GPQA_WRONG, "High-level domain")
    for where, row in _table(files, GPQA_FILE, columns):
        question = required_text(row["Question"], where).strip()
        answers = [required_text(row[column], where).strip() for column in (GPQA_RIGHT, *GPQA_WRONG)]
        order = several_drawn(range(len(answers)), len(answers), f"gpqa {question}")
        yield {
            "problem": question,
            "choices": [answers[place] for place in order],
            "answer": "ABCD"[order.index(0)],
            "category": row["High-level domain"],
        }


GPQA = _benchmark(
    "gpqa",
    "GPQA Diamond: 198 questions of graduate science as multiple choice; gated, accept its terms on the hub first",
    "answers in an order by hash; the domain is the category",
    (
        HubDataset(
            name="Idavidrein/gpqa",
            revision="main",
            license="CC-BY-4.0, gated",
            files=(PublishedFile(GPQA_FILE, num_rows=198),),
        ),
    ),
    _gpqa,
)

VBENCH_FILE = "vbench/VBench_full_info.json"
VBENCH_STYLE = "appearance_style"


def _vbench(files: Files) -> Iterator[Row]:
    for where, row in files.rows(VBENCH_FILE):
        require_columns(row, ("prompt_en", "dimension"), where)
        made: Row = {"prompt": required_text(row["prompt_en"], where), "dimensions": list(row["dimension"])}
        if VBENCH_STYLE in row["dimension"]:
            made[VBENCH_STYLE] = _style(row, where)
        yield made


def _style(row: Row, where: str) -> str:
    """The words of a style: `auxiliary_info.appearance_style.appearance_style`."""
    found: Any = row.get("auxiliary_info")  # Any: JSON
    for _ in range(2):
        found = found.get(VBENCH_STYLE) if isinstance(found, Mapping) else None
    return required_text(found, where)


VBENCH = _benchmark(
    "vbench",
    "the 946 prompts of VBench with the dimensions that each is for",
    "prompt, dimensions, and the words of its style where it has one",
    (
        GitHubRepository(
            name="Vchitect/VBench",
            revision="main",
            license="Apache-2.0",
            files=(PublishedFile(VBENCH_FILE, num_rows=946),),
        ),
    ),
    _vbench,
)

BENCHMARKS = (
    *(GENEVAL_BENCHMARK, GENEVAL2, HPDV2_BENCHMARK, WISE_BENCHMARK, PARTIPROMPTS, DPG, MATH500, GPQA, VBENCH),
)
