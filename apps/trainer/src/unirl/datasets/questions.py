"""Questions with an answer that a program can check: DAPO-Math, AIME 2024, GSM8K, MATH, Geometry3K."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from typing import Any

from unirl.datasets.captioned import required_text
from unirl.datasets.github import GitHubRepository
from unirl.datasets.hub import HubDataset
from unirl.datasets.reading import require_columns
from unirl.datasets.records import IMAGE, Files, Output, Picture, PromptSet, PublishedFile, Row
from unirl.datasets.splitting import distinct
from unirl.types.errors import DataError, as_sentence

DAPO = "data/dapo-math-17k.parquet"


def _dapo(files: Files) -> Iterator[Row]:
    """The user's turn and its answer. The published file repeats every problem about a hundred times, and a few of
    them with two answers, which are left out."""
    answers: dict[str, set[str]] = {}
    prompts: dict[str, str] = {}
    for where, row in files.rows(DAPO, ("prompt", "reward_model")):
        prompt, answer = _user_turn(row["prompt"], where), _ground_truth(row["reward_model"], where)
        key = " ".join(prompt.split())
        prompts.setdefault(key, prompt)
        answers.setdefault(key, set()).add(answer)
    for key, prompt in prompts.items():
        if len(answers[key]) == 1:
            yield {"prompt": prompt, "answer": next(iter(answers[key]))}


def _user_turn(turns: Any, where: str) -> str:  # Any: a cell of a table
    texts = [turn.get("content") for turn in turns or () if isinstance(turn, dict) and turn.get("role") == "user"]
    if len(texts) != 1 or not isinstance(texts[0], str) or not texts[0].strip():
        raise DataError(f"{where}: prompt = {str(turns)[:80]} must have one turn of the user.")
    return texts[0].strip()


def _ground_truth(model: Any, where: str) -> str:  # Any: a cell of a table
    answer = model.get("ground_truth") if isinstance(model, dict) else None
    if answer is None or not str(answer).strip():
        raise DataError(f"{where}: reward_model = {str(model)[:80]} has no ground_truth.")
    return str(answer).strip()


DAPO_MATH = PromptSet(
    name="dapo_math",
    what="competition mathematics with whole numbers as answers",
    made="the user's turn and its answer, without repeats and without problems that have two answers",
    sources=(
        HubDataset(
            name="BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            license="Apache-2.0",
            files=(PublishedFile(DAPO, num_rows=1_791_700),),
        ),
    ),
    outputs=(Output(split="train", file="train.jsonl", rows=_dapo, reads=(DAPO,)),),
)

AIME = "aime_2024_problems.parquet"


def _aime(files: Files) -> Iterator[Row]:
    for where, row in files.rows(AIME, ("Problem", "Answer")):
        if not isinstance(row["Problem"], str) or row["Answer"] is None:
            raise DataError(f"{where}: needs a Problem and an Answer.")
        yield {"prompt": row["Problem"].strip(), "answer": str(row["Answer"])}


AIME24 = PromptSet(
    name="aime24",
    what="the 30 problems of AIME 2024, to judge mathematics by",
    made="Problem and Answer, the answer as text",
    sources=(
        HubDataset(
            name="Maxwell-Jia/AIME_2024",
            revision="main",
            license="MIT",
            files=(PublishedFile(AIME, num_rows=30),),
        ),
    ),
    outputs=(Output(split="test", file="test.jsonl", rows=_aime, reads=(AIME,), num_rows=30),),
)

GSM8K_TRAIN, GSM8K_TEST = "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"


def _gsm8k(files: Files, path: str) -> Iterator[Row]:
    for where, row in files.rows(path, ("question", "answer")):
        solution, marker, answer = required_text(row["answer"], where).rpartition("####")
        if not (solution.strip() and marker and answer.strip()):
            raise DataError(f"{where}: answer = ...{str(row['answer'])[-80:]!r} does not end with #### and a number.")
        yield {"prompt": required_text(row["question"], where), "answer": answer.strip().replace(",", "")}


GSM8K = PromptSet(
    name="gsm8k",
    what="arithmetic word problems of grade school",
    made="question, and the number after ####",
    sources=(
        HubDataset(
            name="openai/gsm8k",
            revision="main",
            license="MIT",
            files=(PublishedFile(GSM8K_TRAIN, num_rows=7473), PublishedFile(GSM8K_TEST, num_rows=1319)),
        ),
    ),
    outputs=(
        Output(split="train", file="train.jsonl", rows=lambda files: _gsm8k(files, GSM8K_TRAIN), reads=(GSM8K_TRAIN,)),
        Output(
            split="test",
            file="test.jsonl",
            rows=lambda files: _gsm8k(files, GSM8K_TEST),
            reads=(GSM8K_TEST,),
            num_rows=1319,
        ),
    ),
)

MATH_TRAIN = "*/train-00000-of-00001.parquet"


def _math(files: Files) -> Iterator[Row]:
    """The answer is what the solution boxes last, after its last "=", as `BoxedMathScorer` reads the model's."""
    from unirl.reward.local.texts.math_equality import answer_of  # imports sympy

    for where, row in files.rows(MATH_TRAIN, ("problem", "level", "type", "solution")):
        answer = answer_of(required_text(row["solution"], where))
        if answer is None or not answer.strip():
            raise DataError(f"{where}: the solution ...{row['solution'][-80:]!r} boxes no answer.")
        yield {
            "prompt": required_text(row["problem"], where),
            "answer": answer.strip(),
            "category": row["type"],
            "level": row["level"],
        }


MATH = PromptSet(
    name="math",
    what="competition mathematics of MATH, to train on; `math500` judges",
    made="problem and the boxed answer of its solution; the type is the category",
    sources=(
        HubDataset(
            name="EleutherAI/hendrycks_math",
            revision="main",
            license="MIT",
            files=(PublishedFile(MATH_TRAIN, num_rows=7500),),
        ),
    ),
    outputs=(Output(split="train", file="train.jsonl", rows=_math, reads=(MATH_TRAIN,)),),
)

GEO3K_TRAIN, GEO3K_TEST = "data/geometry3k/train.zip", "data/geometry3k/test.zip"
_PROBLEM, _DIAGRAM = "data.json", "img_diagram.png"


def _geo3k(files: Files, path: str) -> Iterator[Row]:
    """Problems by number: the text, the diagram, the four choices and the letter of the right one."""
    archive_path = files.only(path)
    columns = ("problem_text", "choices", "answer")
    try:
        with zipfile.ZipFile(archive_path) as archive:
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == _PROBLEM]
            rows: list[Row] = []
            for name in sorted(names, key=_number):
                where = f"{archive_path}:{name}"
                value = json.loads(archive.read(name))
                require_columns(value, columns, where)
                folder = name.rsplit("/", 1)[0]
                try:
                    diagram = archive.read(f"{folder}/{_DIAGRAM}")
                except KeyError as error:
                    raise DataError(f"{where}: has no {_DIAGRAM} next to it. Fetch the file again.") from error
                rows.append(
                    {
                        "problem": str(value["problem_text"]).strip(),
                        "images": [Picture(diagram, ".png")],
                        "choices": [str(choice) for choice in value["choices"]],
                        "answer": str(value["answer"]).strip(),
                    }
                )
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{archive_path}: cannot be read as zip: {as_sentence(error)} Fetch the file again.") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{archive_path}: a {_PROBLEM} is not JSON: {as_sentence(error)} Fetch the file again."
        ) from error
    files.require_rows(path, len(rows))
    return distinct(rows, _identity)


def _identity(row: Row) -> str:
    """Many problems have the same words, and another diagram."""
    diagram = hashlib.sha256(row["images"][0].data).hexdigest()
    return json.dumps([row["problem"], row["choices"], diagram])


def _number(name: str) -> tuple[int, str]:
    """Sort key of a problem: its folder's name."""
    folder = name.rsplit("/", 2)[-2] if "/" in name else ""
    return (int(folder) if folder.isdigit() else 0, name)


GEO3K = PromptSet(
    name="geo3k",
    what="Geometry3K as multiple choice: a diagram, a question, four choices",
    made="text, diagram, choices and letter of each problem, in a table that holds the diagrams",
    media=(IMAGE,),
    sources=(
        GitHubRepository(
            name="lupantech/InterGPS",
            revision="09266bee7683333e1c2053edca3b6e2a8ff8347b",
            license="MIT",
            files=(PublishedFile(GEO3K_TRAIN, num_rows=2101), PublishedFile(GEO3K_TEST, num_rows=601)),
        ),
    ),
    outputs=(
        Output(
            split="train",
            file="train.parquet",
            rows=lambda files: _geo3k(files, GEO3K_TRAIN),
            reads=(GEO3K_TRAIN,),
        ),
        Output(
            split="test",
            file="test.parquet",
            rows=lambda files: _geo3k(files, GEO3K_TEST),
            reads=(GEO3K_TEST,),
        ),
    ),
)
