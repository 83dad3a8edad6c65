"""The first stage: samples of a suite's prompts, in parts that appear whole, so that an interrupted stage continues."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.config.runs import ComposedRun
from unirl.data.data_source import PromptRow, fingerprint
from unirl.distributed.runtime import Runtime
from unirl.suites.suite import Suite
from unirl.tracking.sample_files import SampleFiles
from unirl.trainer.build.assembly import evaluation_of, sampling_of
from unirl.trainer.build.launch import make_runtime
from unirl.trainer.evaluation import EvaluationConfig
from unirl.trainer.held_out import EVAL_ROLLOUT_ID
from unirl.trainer.request import pinned_request
from unirl.trainer.roles import CheckpointerRole, EngineRole, StackRole, SyncRole
from unirl.trainer.samples import take
from unirl.types.errors import ConfigError
from unirl.types.sampling import ARSamplingParams, BaseSamplingParams, DiffusionSamplingParams, StagedSamplingParams

logger = logging.getLogger(__name__)

KIND = "suite"
"""Name of the files of records: suite-000000.jsonl, ..."""
SETTINGS = "settings.json"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the first stage makes."""

    rows: list[PromptRow]
    """One per sample; its id is `<suite>:<prompt>@<index>`, from which its noise is drawn."""
    params: Any
    """Sampling parameters, one sample per row. Any: of the recipe's modality."""
    config: EvaluationConfig
    settings: Mapping[str, Any]
    """All that the samples depend on. Any: JSON values."""

    @property
    def num_parts(self) -> int:
        return -(-len(self.rows) // self.config.batch_size)

    def part(self, number: int) -> list[PromptRow]:
        """The rows of a part. Parts never depend on what was made before, so neither do the batches of an engine."""
        size = self.config.batch_size
        return self.rows[number * size : (number + 1) * size]


def plan_samples(run: ComposedRun, suite: Suite, model: Mapping[str, Any]) -> Plan:  # Any: JSON values
    """What to sample, by the recipe's evaluation. Raises ConfigError if prompts are absent or the recipe makes other
    media than the suite judges."""
    prompts = suite.rows()
    training = sampling_of(run)
    config = evaluation_of(run) or EvaluationConfig(prompts=str(suite.prompt_file))
    _require_kind(suite, training, run)
    params = config.params(training)
    if isinstance(training, ARSamplingParams) and suite.samples_per_prompt > 1:
        params = dataclasses.replace(config.passes(training), samples_per_prompt=1)
    rows = [
        dataclasses.replace(row, prompt_id=f"{suite.name}:{row.prompt_id}@{index}")
        for row in prompts
        for index in range(suite.samples_per_prompt)
    ]
    settings = {
        "suite": suite.name,
        "version": suite.version,
        "model": dict(model),
        "num_prompts": len(prompts),
        "prompts": fingerprint(prompts),
        "samples_per_prompt": suite.samples_per_prompt,
        "samples_per_part": config.batch_size,
        "policy": config.policy,
        "sampling": dataclasses.asdict(params),
    }
    return Plan(rows, params, config, json.loads(json.dumps(settings, default=str)))


def generate(run: ComposedRun, run_dir: Path, suite: Suite, plan: Plan, folder: Path, checkpoint: int | None) -> None:
    """Make the parts that `folder` lacks. checkpoint: a step of the run, or None for the model before training.

    Raises ConfigError for samples there that were made otherwise, OSError if a part cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, plan.settings)
    missing = [number for number in range(plan.num_parts) if not part_file(folder, number).exists()]
    if not missing:
        logger.info("%s: all %d samples are there", folder, len(plan.rows))
        return
    files = SampleFiles(folder)
    with make_runtime(run, run_dir, asks_teachers=False, scores=False) as runtime:
        runtime.role("stack", StackRole).prepare()
        if checkpoint is not None:
            runtime.role("checkpointer", CheckpointerRole).load(checkpoint)
        if runtime.has_role("sync"):
            runtime.role("sync", SyncRole).push(plan.config.policy)
        for number in missing:
            _make_part(runtime, plan, number, files)
            if not part_file(folder, number).exists():
                raise OSError(f"{part_file(folder, number)} cannot be written, see the log.")
            logger.info("suite %s: part %d of %d is there", suite.name, number + 1, plan.num_parts)


def _make_part(runtime: Runtime, plan: Plan, number: int, files: SampleFiles) -> None:
    part = plan.part(number)
    padded = list(part)
    while len(padded) % runtime.num_shards:
        padded.append(part[0])
    request = pinned_request(runtime, padded, plan.params, EVAL_ROLLOUT_ID)
    with runtime.role("engine", EngineRole).generate(request, policy=plan.config.policy) as resp:
        roots = resp.meta.root_track().sample_ids[: len(part)]
        taken = take(resp, roots, whole=roots)
    files.write(KIND, number, [record for records in taken.values() for record in records])


def part_file(folder: Path, number: int) -> Path:
    """The records of a part."""
    return folder / f"{KIND}-{number:06d}.jsonl"


def claim(folder: Path, settings: Mapping[str, Any]) -> None:  # Any: JSON values
    """Write what a folder's content is made with. Raises ConfigError if it says something else already."""
    path = folder / SETTINGS
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        changed = list(_changes(known, settings))
        if changed:
            raise ConfigError(
                f"{folder} holds what was made with other settings: {'; '.join(changed[:4])}. Give another folder with "
                "--output, or remove this one."
            )
        return
    write_whole(path, json.dumps(settings, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _changes(known: Any, wanted: Any, place: str = "") -> Sequence[str]:  # Any: JSON values
    if isinstance(known, Mapping) and isinstance(wanted, Mapping):
        return [
            change
            for key in dict.fromkeys([*known, *wanted])
            for change in _changes(known.get(key), wanted.get(key), f"{place}.{key}" if place else str(key))
        ]
    return [] if known == wanted else [f"{place} = {known!r}, now {wanted!r}"]


def _require_kind(suite: Suite, training: BaseSamplingParams, run: ComposedRun) -> None:
    name = run.file.recipe
    last = list(training.stages.values())[-1] if isinstance(training, StagedSamplingParams) else training
    if isinstance(last, DiffusionSamplingParams):
        made = "video" if (last.num_frames or 1) > 1 else "image"
    else:
        made = "text"
    if made != suite.makes:
        raise ConfigError(
            f"suite {suite.name} judges {suite.makes}s, and {name} makes {made}s. Give a recipe or run that makes "
            f"{suite.makes}s."
        )
