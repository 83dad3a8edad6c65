"""Rules of held-out evaluations: prompts, an existing policy copy, matching options. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unirl.data.datasets import check_dataset_folder, read_numbered_rows
from unirl.data.rules import media_reaches_the_model, prompts_outside_a_grammar, rows_without_answers, unreadable
from unirl.types.episodes import MOVES
from unirl.types.errors import DataError
from unirl.types.messages import brings_conversation
from unirl.types.preference import IMAGES
from unirl.types.recipe import Fault, Machine, Messages, Part, Run


def evaluated_policy_exists(own: Part, run: Run) -> Messages:
    """The evaluated policy copy exists."""
    policy = own.node.get("policy")
    if policy is None:
        return
    kept: dict[str, set[str]] = {}
    for view in run.views():
        if view.policy.trains:
            kept[view.sampled] = kept.get(view.sampled, set()) | _kept_copies(view)
    if not isinstance(policy, Mapping):
        if len(kept) > 1:
            shown = ", ".join(f"{name}: {policy}" for name in kept)
            yield f"eval.policy = {policy!r}: this recipe trains several policies. Say of which: {{{shown}}}."
            return
        policy = dict.fromkeys(kept, policy)
    for name, copy in policy.items():
        if copy not in kept.get(name, ()):
            backend = run.policies.get(name, run.policy).backend
            hint = f" Set {backend.at}.ema to keep an average." if copy == "ema" else ""
            shown, prefix = (f"{{{name}: {copy}}}", "{own}: ") if len(kept) > 1 else (repr(copy), "")
            there = [prefix.format(own=own) + each for own, copies in kept.items() for each in sorted(copies)]
            yield f"eval.policy = {shown} is not kept by this recipe; there are {', '.join(there) or 'none'}.{hint}"


def _kept_copies(run: Run) -> set[str]:
    """Copies of the sampled policy's weights."""
    backend, kept = run.policy.backend, {"default"}
    if backend.get("ema") is not None:
        kept.add("ema")
    # Engines receive whole weights or an adapter, never the base without its adapter.
    is_base = backend.get("lora") is not None and not run.engine.ability("has_own_weights")
    if is_base or backend.get("keep_reference"):
        kept.add("reference")
    sampled = {algorithm.ability("rollout_policy") for algorithm in run.policy.algorithms.values()}
    kept.update(name for name in sampled if isinstance(name, str))
    return kept


def prompts_exist(own: Part, run: Run, machine: Machine) -> Messages:
    """The prompt file exists and is not empty, every row is valid, and no row has images that would be evaluated
    instead of samples. What is there and wrong is a Fault."""
    path = own.node.get("prompts")
    if path is None:
        return
    problem = unreadable("eval.prompts", str(path), machine)
    if problem is not None:
        yield problem
    else:
        yield from map(Fault, _wrong_rows(str(path), run))


def _wrong_rows(path: str, run: Run) -> Messages:
    try:
        if Path(path).expanduser().is_dir():
            check_dataset_folder(Path(path).expanduser())  # its rows take a library that a check does without
            return
        numbered = read_numbered_rows(path)
    except DataError as error:
        yield f"eval.prompts: {error}"
        return
    rows = [row for _, row in numbered]
    yield from prompts_outside_a_grammar("eval.prompts", path, numbered, run)
    if run.engine.ability("needs_images") and any(IMAGES in row.metadata for row in rows):
        yield f"eval.prompts = {path} brings images, which would be judged in the policy's place. Take them out."
    if run.engine.ability("needs_texts") and any(brings_conversation(row.metadata) for row in rows):
        yield f"eval.prompts = {path} brings conversations, which would be judged in the policy's place. Take them out."
    if run.engine.ability("needs_moves") and any(row.metadata.get(MOVES) for row in rows):
        yield f"eval.prompts = {path} brings moves, which would be judged in the policy's place. Take them out."
    yield from rows_without_answers("eval.prompts", path, rows, run)
    yield from media_reaches_the_model("eval.prompts", path, rows, run)


CONFIG = "unirl.trainer.evaluation.EvaluationConfig"
OF_LATENTS = ("num_inference_steps", "guidance_scale", "guidance_scale_2", "distilled_guidance_scale", "post_solver")
OF_TEXTS = ("max_new_tokens",)
OF_DRAWS = ("temperature",)
OF_TEXTS_ALONE = (
    *("pass_at", "pass_samples", "pass_prompts", "pass_metric", "pass_threshold", "pass_temperature", "pass_top_p"),
)
OF_SEVERAL = ("without_writer",)


def options_fit_what_is_sampled(own: Part, run: Run) -> Messages:
    """Every option applies to some kind of samples of the run."""
    if CONFIG not in (own.path, *own.lineage):
        return
    acts = any(stage.sampling.ability("samples_actions") for stage in run.stages)
    kinds = {
        bool(stage.sampling.ability("samples_tokens"))
        for stage in run.stages
        if not stage.sampling.ability("samples_actions")
    }
    made = "texts and images of them" if len(kinds) > 1 else "texts" if True in kinds else "images or videos"
    made = "episodes" if acts else made
    for options, of, fits in (
        (OF_LATENTS, "images and videos", False in kinds),
        (OF_TEXTS, "texts", True in kinds),
        (OF_DRAWS, "texts", True in kinds or acts),
        (OF_TEXTS_ALONE, "texts that are scored themselves", kinds == {True} and not run.is_staged),
        (OF_SEVERAL, "images of texts that a model writes", len(kinds) > 1),
    ):
        given = [name for name in options if own.node.get(name) not in (None, False)]
        if given and not fits:
            shown = ", ".join(f"eval.{name}" for name in given)
            yield f"{shown}: of {of}, but this run samples {made}. Remove {'it' if len(given) == 1 else 'them'}."


RULES = (evaluated_policy_exists, options_fit_what_is_sampled)
MACHINE_RULES = (prompts_exist,)
