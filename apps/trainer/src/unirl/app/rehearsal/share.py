"""The recipe of one rank: what a rehearsal runs in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unirl.app.memory import trained_steps
from unirl.app.rehearsal.branching import Branching, branching_of
from unirl.app.rehearsal.prompts import eval_prompts, write_prompts
from unirl.app.rehearsal.rewards import note_of, scorers_of
from unirl.config.check import check_recipe
from unirl.config.placement import groups_of_run
from unirl.config.runs import ComposedRun
from unirl.models.releases.folder import is_known, write_configurations
from unirl.rehearsal.repeats import PartKind
from unirl.types.devices import PRETEND
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET, Part, Policy, Stage

MICRO_BATCHES = 2
"""Micro-batches of an update: the second one has gradients in memory, and those after it are like it."""
UPDATES = 2
"""Updates of a rollout: the second one has the optimizer's state in memory, and those after it are like it."""
ANSWER_TOKENS = 512
"""Tokens of what an environment answers to a turn, where nothing else is said."""
DIRECT_IMAGES = "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"
DIRECT_TEXTS = "unirl.rollout.engine.trainside.text.TrainsideTextEngine"
DIRECT_ACTIONS = "unirl.rollout.engine.episodes.engine.EpisodesEngine"
"""Engines that sample with the model that trains."""
KEPT = ("forward_batch_size", "media_bits", "decode", "drop_text_encoders", "track", "environment")
"""Keywords of such an engine that it has too."""
APART_ONLY = ("sleep_engine", "offload_weights")
"""Options of `residency` that need such an engine."""
REWARD = ("track", "credit", "weights", "truncated_reward", "overlong_buffer_len", "overlong_penalty_factor")
"""What stays of a recipe's reward."""

Recipe = dict[str, Any]  # Any: a recipe's values


@dataclass(frozen=True)
class Work:
    """What one rank does of a track in a step."""

    num_samples: int
    """In a rollout of the recipe."""
    num_kept: int
    """What `selection` leaves of those for training."""
    num_made: int
    """In a rollout of the rehearsal; the others are added to what memory holds."""
    num_trained: int
    """Samples that are trained on, the first micro-batches of every update; 0 for a track that is not."""
    num_replayed: int = 0
    """Samples of earlier rollouts that are trained on too (`schedule.experience`)."""
    mean_depth: float = 1.0
    """Training of a sample in the mean over rollouts, relative to that of the rehearsed ones, which go deepest."""
    fractions: Mapping[PartKind, float] = field(default_factory=dict)
    """How often some kinds of `TrainingPart` are computed for a sample in the mean, relative to training as a whole:
    those of one update alone, and what does not depend on the depth."""


@dataclass(frozen=True)
class Share:
    """What one rank does of a recipe's step, and how much of it is rehearsed."""

    run: ComposedRun
    """The run of one process, on the pretend device."""
    num_ranks: int
    """Ranks of the group that trains."""
    works: Mapping[str, Work]
    """By track, the first one first."""
    apart: tuple[Stage, ...]
    """Stages of the recipe whose engines have separate weights: the model that trains samples for them."""
    evaluated: float
    """Fraction of this rank's samples of an evaluation that are rehearsed, one forward; 0 without an evaluation."""
    updates: float
    """Updates of a rollout over those that are rehearsed."""
    pushes: tuple[bool | None, ...]
    """Per policy that trains: True if its adapters are gathered for an engine, False if all weights are, None without
    pushes."""
    answer_tokens: int
    """Tokens of what an environment answers to a turn, where an episode has room for them."""
    branching: Branching | None
    """Where rollouts differ in what they compute."""
    notes: tuple[str, ...]
    """What is not rehearsed, or is taken from a formula."""

    @property
    def root(self) -> Work:
        """The work of the track that reads the prompts."""
        return next(iter(self.works.values()))


def share_of(run: ComposedRun, folder: Path, answer_tokens: int = ANSWER_TOKENS) -> Share:
    """One rank's share of a run, its models' configurations and prompts written to `folder`.

    Raises ConfigError for a recipe that cannot be rehearsed, with the reason.
    """
    recipe: Recipe = copy.deepcopy(dict(run.resolved))
    train = groups_of_run(run)[0]
    num_ranks = len(train.devices)
    branching = branching_of(run)
    apart = tuple(stage for stage in run.stages if stage.engine.ability("has_own_weights"))
    prompts, works = _works(run, num_ranks)
    recipe.update(
        runtime="local",
        num_devices=1,
        batch_size=prompts,
        num_rollouts=2,
        max_cpu_s=None,
        trackers={},
        guardrails={"action": "off"},
        placement={},
        pools={},
        save={"interval": 0},
        media_interval=0,
        run_dir=None,
        resume=None,
        scouts=None,
    )
    if run.selection is not None:  # drawn scores would choose other numbers of samples; pairs are of the best and worst
        kept = (TARGET, "best_of", "best_of_children")
        recipe["selection"] = {key: value for key, value in run.selection.node.items() if key in kept}
    recipe["reward"] = {
        **{key: value for key, value in run.resolved["reward"].items() if key in REWARD},
        "_target_": "unirl.reward.service.RewardService",
        "scorers": dict(scorers_of(run, folder)),
    }
    for stage in apart:
        _sample_directly(recipe, stage, works[str(stage.track)])
    for stage in run.stages:
        if stage.turns is not None:
            _answer_always(_at(recipe, stage.turns.at))
    for policy in run.policies.values():
        _at(recipe, policy.stack.at)["num_updates_per_batch"] = _num_updates(policy)
    for at, _ in _random_depths(run):
        _at(recipe, at)["truncation"] = "full"
    if apart:  # what only engines with separate weights can do
        residency = run.resolved.get("residency") or {}
        recipe["residency"] = {key: residency[key] for key in residency if key not in APART_ONLY}
    folder.mkdir(parents=True, exist_ok=True)
    frames = max(stage.sampling.get("num_frames", 1) for stage in run.stages)
    size = run.stages[0].sampling.get("height"), run.stages[0].sampling.get("width")
    brings_images = bool(run.data.ability("brings_images"))
    recipe["data"] = write_prompts(
        recipe["data"],
        folder,
        frames,
        size if brings_images else None,
        brings_targets=bool(run.data.ability("brings_targets")),
    )
    prompts_of_eval = eval_prompts(recipe["data"], recipe.get("eval"), folder, brings_images=brings_images)
    evaluated = _evaluate_one_forward(recipe, prompts_of_eval, run, next(iter(works.values())), num_ranks)
    for at, bundle in _bundles(recipe):
        source = bundle.get("pretrained_model")
        if source is None:  # built from its section, with weights of its seed
            continue
        if not Path(str(source)).is_dir():
            if not is_known(str(source)):
                raise ConfigError(f"{at}.pretrained_model = {source}: the configurations of this model are not known.")
            place = folder / at
            write_configurations(str(source), place)
            bundle["pretrained_model"] = str(place)
            if bundle.get("tokenizer") is not None:
                bundle["tokenizer"] = str(place)  # the stand-in of a release that keeps its own elsewhere
    # The true run has passed the rules between sections; one device alone would not, with a topology of several.
    small = check_recipe(recipe, is_exported=True)
    return Share(
        run=replace(small, device=PRETEND),
        num_ranks=num_ranks,
        works=works,
        apart=apart,
        evaluated=evaluated,
        updates=run.policy.stack.get("num_updates_per_batch", 1) / _num_updates(run.policy),
        pushes=tuple(
            None if policy.sync is None else bool(policy.sync.ability("sends_adapters"))
            for policy in run.policies.values()
        ),
        answer_tokens=answer_tokens,
        branching=branching,
        notes=tuple(_notes(run, apart, answer_tokens, branching)),
    )


def _notes(
    run: ComposedRun, apart: tuple[Stage, ...], answer_tokens: int, branching: Branching | None
) -> Iterator[str]:
    yield note_of(run)
    if run.selection is not None and run.selection.get("drop_zero_variance") and kept_fraction(run) == 1:
        yield "all samples are trained on: how many selection.drop_zero_variance leaves out depends on their rewards"
    if run.selection is not None and run.selection.get("dynamic_sampling"):
        yield "no group is made again, as selection.dynamic_sampling would where all of its rewards are equal"
    if run.file.scouts is not None:
        yield f"the {run.file.scouts.per_prompt} scouts of each prompt (scouts.per_prompt) are not rehearsed"
    for stage in run.stages:
        if _makes_texts(stage):
            yield f"every text of {stage.track or 'the engine'} has {stage.sampling.get('max_new_tokens')} tokens"
        if stage.turns is not None:
            yield (
                f"every episode has {stage.turns.get('max_turns')} turns of so many tokens, as far as {stage.turns.at} "
                f"and the context allow, with answers of up to {answer_tokens} (--answer-tokens)"
            )
    if branching is not None:
        yield "samples of a group part at steps that differ by rollout; FLOPs of the rollout are of their mean"
    for at, depth in _random_depths(run):
        yield f"{at}.truncation is rehearsed at its deepest; FLOPs are of the mean, {depth:.2f} of that"
    for stage in apart:
        yield f"{stage.engine.name} is counted by formulas; the model that trains made its samples"


def kept_fraction(run: ComposedRun) -> float:
    """Fraction of a rollout's samples that are trained on, as far as the recipe says: in (0, 1]."""
    if run.selection is None:
        return 1.0
    best_of = run.selection.get("best_of")
    if best_of is None and run.selection.get("drop_zero_variance"):
        best_of = run.advantages.node.get("num_best")  # of weights; the others are 0
    return 1.0 if best_of is None else min(1.0, best_of / run.samples_per_prompt)


def _of_children(run: ComposedRun, stage: Stage) -> float:
    """Fraction of a stage's samples that `best_of_children` leaves of those that grew from kept ones."""
    best_of = None if run.selection is None else run.selection.get("best_of_children")
    if stage.grows_from is None:
        return 1.0
    above = _of_children(run, run.stage_of(stage.grows_from))
    return above if best_of is None else above * best_of / stage.sampling.get("samples_per_prompt", 1)


def _random_depths(run: ComposedRun) -> Iterator[tuple[str, float]]:
    """Place of each algorithm that trains through the last K of T steps, K drawn from 1 .. T for each rollout, and the
    mean of K / T."""
    for stage in run.stages:
        for algorithm in _algorithms(run, stage):
            if algorithm.get("truncation") == "random":
                steps = stage.sampling.get("num_inference_steps")
                yield algorithm.at, (steps + 1) / (2 * steps)


def _algorithms(run: ComposedRun, stage: Stage) -> Iterator[Part]:
    """The algorithm that trains on a stage's track, if any."""
    algorithm = run.all_policies[stage.policy].algorithms.get(str(stage.track))
    if algorithm is not None:
        yield algorithm


def _makes_texts(stage: Stage) -> bool:
    return stage.sampling.get("max_new_tokens") is not None


# Sizes -----------------------------------------------------------------------------------------------------------


def _works(run: ComposedRun, num_ranks: int) -> tuple[int, dict[str, Work]]:
    """Prompts of a rehearsed rollout, and the work of each track: whole groups that fill one forward of the rollout
    and the first micro-batches of every update."""
    per_prompt: dict[str | None, int] = {}
    for stage in run.stages:
        above = per_prompt[stage.grows_from] if stage.grows_from is not None else 1
        per_prompt[stage.track] = above * stage.sampling.get("samples_per_prompt", 1)
    of_rank = run.batch_size * run.policy.ranks_per_sample / num_ranks
    num_samples = {track: max(1, round(of_rank * num)) for track, num in per_prompt.items()}
    kept = {stage.track: _num_kept(run, stage, num_samples[stage.track]) for stage in run.stages}
    fraction = {stage.track: _rehearsed_fraction(run, stage) for stage in run.stages}
    trained = {stage.track: _num_trained(run, stage) for stage in run.stages}
    prompts = 1
    for stage in run.stages:
        own = num_samples[stage.track]
        # Of several stages one prompt makes so much that forwards are full.
        full = 1 if run.is_staged else min(own, stage.engine.get("forward_batch_size") or 1)
        wanted = max(math.ceil(min(trained[stage.track], kept[stage.track]) / fraction[stage.track]), full)
        prompts = max(prompts, -(-wanted // per_prompt[stage.track]))
    updates = math.lcm(*map(_num_updates, run.policies.values()))
    first = run.stages[0].track
    while round(prompts * per_prompt[first] * fraction[first]) % updates:
        prompts += 1
    depths = dict(_random_depths(run))
    works: dict[str, Work] = {}
    for stage in run.stages:
        depth = next((depths[part.at] for part in _algorithms(run, stage) if part.at in depths), 1.0)
        works[str(stage.track)] = Work(
            num_samples=num_samples[stage.track],
            num_kept=kept[stage.track],
            num_made=prompts * per_prompt[stage.track],
            num_trained=min(
                trained[stage.track],
                round(prompts * per_prompt[stage.track] * fraction[stage.track]),
                _most_trained(run.all_policies[stage.policy], kept[stage.track]),
            ),
            num_replayed=_num_replayed(run, kept[stage.track]),
            mean_depth=depth,
            fractions=_fractions(run.all_policies[stage.policy], depth),
        )
    return prompts, works


def _num_kept(run: ComposedRun, stage: Stage, num_samples: int) -> int:
    """Samples of a track of one rank that `selection` keeps, which divide into updates."""
    updates = math.lcm(*(policy.stack.get("num_updates_per_batch", 1) for policy in run.policies.values()))
    kept = -(-round(num_samples * kept_fraction(run) * _of_children(run, stage)) // updates) * updates
    return min(num_samples, kept)


def _num_replayed(run: ComposedRun, num_kept: int) -> int:
    """Samples of one rank that come from earlier rollouts, in groups as large as those of this one."""
    experience = run.file.schedule.experience
    if experience is None:
        return 0
    of_group = run.samples_per_prompt * kept_fraction(run)
    best_of = min(experience.best_of or of_group, of_group)
    return round(num_kept * experience.groups_per_rollout / run.batch_size * best_of / of_group)


def _rehearsed_fraction(run: ComposedRun, stage: Stage) -> float:
    """Fraction of a track's samples of a rehearsed rollout that are there to be trained on: the best are chosen there
    too."""
    best_of = None if run.selection is None else run.selection.get("best_of")
    return _of_children(run, stage) * (1.0 if best_of is None else best_of / run.samples_per_prompt)


def _num_updates(policy: Policy) -> int:
    """Updates of a rehearsed rollout."""
    return min(policy.stack.get("num_updates_per_batch", 1), UPDATES)


def _fractions(policy: Policy, depth: float) -> dict[PartKind, float]:
    """Those of a `Work` for several updates. All samples have an anchor where they are trained on again."""
    updates, rehearsed = policy.stack.get("num_updates_per_batch", 1), _num_updates(policy)
    epochs = policy.stack.get("num_epochs", 1)
    found: dict[PartKind, float] = {"reward gradients": 1 / depth} if depth != 1 else {}
    if updates == rehearsed:
        return found
    later = (epochs - 1 / updates) / (epochs - 1 / rehearsed)
    return {
        **found,
        "first update": rehearsed / updates,
        "later updates": later,
        "anchors": later if epochs == 1 else 1.0,
    }


def _most_trained(policy: Policy, num_samples: int) -> int:
    """Samples in the rehearsed updates, none of which has more than those of the run."""
    return _num_updates(policy) * max(1, num_samples // policy.stack.get("num_updates_per_batch", 1))


def _num_trained(run: ComposedRun, stage: Stage) -> int:
    """Samples of a track that show what training takes."""
    policy = run.all_policies[stage.policy]
    algorithm = policy.algorithms.get(str(stage.track))
    if algorithm is None:
        return 0
    updates, micro = _num_updates(policy), policy.stack.get("micro_batch_size", 1)
    if _makes_texts(stage):
        return updates * micro * MICRO_BATCHES
    rows = micro * trained_steps(algorithm, stage.sampling)
    # Several backward passes of one micro-batch show the same as several micro-batches.
    parts = rows // (algorithm.get("rows_per_forward") or rows)
    return updates * micro * (1 if parts > MICRO_BATCHES else MICRO_BATCHES)


# Other sections --------------------------------------------------------------------------------------------------


def _sample_directly(recipe: Recipe, stage: Stage, work: Work) -> None:
    """Let the model that trains sample for a stage."""
    engine = {key: value for key, value in stage.engine.node.items() if key in KEPT}
    engine.setdefault("forward_batch_size", work.num_made)
    section, _, key = stage.engine.at.rpartition(".")
    own = _at(recipe, section)
    makes_actions = stage.sampling.ability("samples_actions")
    direct = DIRECT_TEXTS if _makes_texts(stage) else DIRECT_ACTIONS if makes_actions else DIRECT_IMAGES
    own[key] = {"_target_": direct, **engine}
    for policy in (recipe, *(recipe.get("policies") or {}).values()):
        policy.pop("sync", None)


def _answer_always(turns: Recipe) -> None:
    """Let an environment answer whatever a model without weights writes, in a process of this machine."""
    turns.pop("pool", None)
    turns["environment"] = {
        "_target_": "unirl.app.rehearsal.environment.AnsweringEnvironment",
        "environment": turns["environment"],
    }


def _evaluate_one_forward(recipe: Recipe, path: str, run: ComposedRun, work: Work, num_ranks: int) -> float:
    """Let the evaluation sample as many prompts as one forward takes; returns the fraction of this rank's samples."""
    if run.evaluation is None:
        return 0.0
    of_rank = max(1, round(run.evaluation.get("num_samples") / num_ranks))
    num = min(run.engine.get("forward_batch_size") or work.num_made, of_rank)
    left_out = ("pass_at", "pass_samples", "pass_prompts", "without_writer")
    kept = {key: value for key, value in run.evaluation.node.items() if key not in left_out}
    recipe["eval"] = {**kept, "prompts": path, "num_samples": num, "batch_size": num}
    return num / of_rank


def _at(recipe: Recipe, place: str) -> Recipe:
    """The section at a place such as `policies.writer`, to be changed."""
    found = recipe
    for key in place.split(".") if place else ():
        found = found[key]
    return found


def _bundles(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Every bundle of the recipe by its place."""
    if recipe.get("bundle"):
        yield "bundle", recipe["bundle"]
    for name, sections in (recipe.get("policies") or {}).items():
        if isinstance(sections, Mapping) and sections.get("bundle"):
            yield f"policies.{name}.bundle", sections["bundle"]
