"""The second stage: scores of the samples of the first, in parts that appear whole."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from unirl.config.instantiation import instantiate_at
from unirl.reward.base import LocalScorer
from unirl.suites.generating import SETTINGS, claim, part_file, write_whole
from unirl.suites.suite import Judged, Suite
from unirl.tracking.gallery import results
from unirl.tracking.sample_files import read_samples
from unirl.types.errors import ConfigError, RewardError
from unirl.types.media import ImageLists, Images, Primitive, Texts, Videos
from unirl.types.protocols.closing import Closeable
from unirl.types.protocols.rewards import Scorer
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.samples import Image, SampleRecord, Text, Video

logger = logging.getLogger(__name__)


@runtime_checkable
class KeepsDetails(Protocol):
    """A scorer that knows more of a sample than its scores."""

    def take_details(self) -> Mapping[str, Mapping[str, Any]]:  # Any: JSON values
        """What it knows of the samples since the last call, by id."""
        ...


def score(
    suite: Suite, samples: Path, folder: Path, num_parts: int, scorers: Sequence[Scorer] | None, device: str
) -> list[Judged]:
    """Score the parts that `folder` lacks; returns all samples with their scores, without their media.

    scorers: None builds them where a part is missing. Raises ConfigError if a part of the samples is missing, a scorer
    cannot be built, or scores there are of other scorers; RewardError if no sample could be scored.
    """
    absent = [number for number in range(num_parts) if not part_file(samples, number).exists()]
    if absent:
        raise ConfigError(
            f"{samples}: {len(absent)} of {num_parts} parts are missing. Make them with: --stage generate."
        )
    claim_scores(suite, folder)
    missing = missing_scores(folder, num_parts)
    if missing:
        scorers = build_scorers(suite) if scorers is None else scorers
        for scorer in scorers:
            if isinstance(scorer, LocalScorer):
                scorer.move_to(device)
        try:
            for number in missing:
                _score_part(suite, scorers, read_samples(part_file(samples, number)), part_file(folder, number))
                logger.info("suite %s: scores of part %d of %d are there", suite.name, number + 1, num_parts)
        finally:
            for scorer in scorers:
                if isinstance(scorer, Closeable):
                    scorer.close()
    judged = read_judged(suite, samples, folder, num_parts)
    if not any(each.scores for each in judged):
        reason = next((each.error for each in judged), "there are none")
        raise RewardError(f"suite {suite.name}: none of {len(judged)} samples could be scored; first error: {reason}")
    _require_metrics(suite, judged)
    return judged


def claim_scores(suite: Suite, folder: Path) -> None:
    """Make the folder of the scores of these scorers. Raises ConfigError if it has those of others."""
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, {"suite": suite.name, "version": suite.version, "scorers": _plain(suite.scorers)})


def missing_scores(folder: Path, num_parts: int) -> list[int]:
    """Parts without scores."""
    return [number for number in range(num_parts) if not part_file(folder, number).exists()]


def read_judged(suite: Suite, samples: Path, folder: Path, num_parts: int) -> list[Judged]:
    """All samples with their scores, which must be there."""
    return [
        each
        for number in range(num_parts)
        for each in _joined(suite, part_file(samples, number), part_file(folder, number))
    ]


def parts_of(samples: Path) -> int:
    """Number of parts that the first stage meant to make. Raises ConfigError if it never began."""
    path = samples / SETTINGS
    if not path.exists():
        raise ConfigError(f"{samples} has no samples. Make them with: --stage generate.")
    settings = json.loads(path.read_text(encoding="utf-8"))
    return -(-settings["num_prompts"] * settings["samples_per_prompt"] // settings["samples_per_part"])


def build_scorers(suite: Suite) -> list[Scorer]:
    """The scorers of a suite. Raises ConfigError, or ImportError, with what it needs and how to get it."""
    try:
        scorers = [
            instantiate_at(f"suite.scorers.{name}", _plain(node) | {"name": name})
            for name, node in suite.scorers.items()
        ]
    except (ConfigError, ImportError) as error:
        if not suite.needs:
            raise
        raise type(error)(f"suite {suite.name}: {error}\n{suite.needs}") from error
    return scorers


def _score_part(suite: Suite, scorers: Sequence[Scorer], records: Sequence[SampleRecord], file: Path) -> None:
    made = results(records)
    lines: dict[str, dict[str, Any]] = {  # Any: JSON values
        record.sample_id: {"sample_id": record.sample_id, "scores": {}, "error": None, "details": {}} for record in made
    }
    for scorer in scorers:
        for alike in _alike([record for record in made if suite.asks(scorer.name, record.metadata)]):
            answer = _scored(scorer, request_of(alike))
            for row, record in enumerate(alike):
                line = lines[record.sample_id]
                line["scores"] |= _scores(scorer.name, answer, row)
                line["error"] = line["error"] or answer.errors[row]
        if isinstance(scorer, KeepsDetails):
            for sample, details in scorer.take_details().items():
                lines[sample]["details"] |= details
    write_whole(file, "".join(json.dumps(lines[record.sample_id], allow_nan=False) + "\n" for record in made))


def _scored(scorer: Scorer, request: RewardRequest) -> RewardResponse:
    return scorer.score_isolated(request, "sample") if isinstance(scorer, LocalScorer) else scorer.score(request)


def _scores(name: str, answer: RewardResponse, row: int) -> dict[str, float]:
    if answer.errors[row] is not None:
        return {}
    columns = {name: answer.rewards, **answer.component_rewards}
    return {name: float(values[row]) for name, values in columns.items() if math.isfinite(values[row])}


def _alike(records: Sequence[SampleRecord]) -> Iterator[list[SampleRecord]]:
    """Records that one request can hold: of one kind of media and, of images and videos, of one size."""
    groups: dict[tuple[Any, ...], list[SampleRecord]] = {}  # Any: a kind and its shape
    for record in records:
        match record.media:
            case Image(pixels):
                key = (Image, tuple(pixels.shape), bool(record.given))
            case Video(frames, fps):
                key = (Video, tuple(frames.shape[1:]), fps)
            case other:
                key = (type(other), bool(record.given))
        groups.setdefault(key, []).append(record)
    yield from groups.values()


def request_of(records: Sequence[SampleRecord]) -> RewardRequest:
    """What a scorer is asked about records of one kind and size. Raises ConfigError for media without scorers."""
    media = [record.media for record in records]
    generated: dict[str, Primitive]
    if all(isinstance(each, Image) for each in media):
        generated = {"image": Images(pixels=torch.stack([each.pixels for each in media if isinstance(each, Image)]))}
    elif all(isinstance(each, Video) for each in media):
        videos = [each for each in media if isinstance(each, Video)]
        packed = Videos.pack(frames=[each.frames for each in videos])
        generated = {"video": packed.replace(fps=videos[0].fps)}
    elif all(isinstance(each, Text) for each in media):
        generated = {"text": Texts(texts=[each.text for each in media if isinstance(each, Text)])}
    else:
        raise ConfigError(f"samples of {type(media[0]).__name__} cannot be scored; suites judge images, videos, texts.")
    given = [[item.pixels / 255 for item in record.given if isinstance(item, Image)] for record in records]
    primitives: dict[str, Primitive] = {"text": Texts(texts=[record.prompt for record in records])}
    if any(given):
        primitives["image"] = ImageLists(images=given)
    return RewardRequest(
        sample_ids=[record.sample_id for record in records],
        group_ids=[record.group_id for record in records],
        primitives=primitives,
        generated=generated,
        metadata=[dict(record.metadata) for record in records],
    )


def _joined(suite: Suite, samples: Path, scores: Path) -> Iterator[Judged]:
    """Records of a part with their scores."""
    lines = [json.loads(line) for line in scores.read_text(encoding="utf-8").splitlines()]
    known = {line["sample_id"]: line for line in lines}
    for text in samples.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["sample_id"] not in known:
            continue  # a stage in between, such as the text that an image was drawn from
        found = known[line["sample_id"]]
        prompt_id, _, index = line["prompt_id"].removeprefix(f"prompt:{suite.name}:").rpartition("@")
        yield Judged(
            prompt=line["prompt"],
            media=line["media"],
            metadata=line["metadata"],
            prompt_id=prompt_id,
            index=int(index),
            categories=suite.categories_of(line["metadata"]),
            scores={} if found["error"] else found["scores"],
            error=found["error"],
            details=found["details"],
        )


def _require_metrics(suite: Suite, judged: Sequence[Judged]) -> None:
    for metric in suite.metrics:
        counted = [each.scores for each in judged if each.scores and suite.counts(metric, each.metadata)]
        if counted and not any(metric.name in scores for scores in counted):
            raise ConfigError(
                f"suite {suite.name}: the scorer gives {', '.join(counted[0])}, not {metric.name}. Name the scorer so, "
                "or change suite.scorers."
            )


def _plain(node: Any) -> Any:  # Any: a recipe's values
    """Mappings and sequences as dicts and lists."""
    if isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in node.items()}
    return [_plain(each) for each in node] if isinstance(node, (list, tuple)) else node
