"""Recipe rules of engines that sample latents in other processes. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unirl.rollout.engine.served_latents.folder import REPLICA
from unirl.types.recipe import Messages, Part, Run

Rule = Callable[[Part, Run], Messages]

NOT_COMPARED = {
    "AnyFlowFARBundle": "AnyFlow FAR makes a video chunk by chunk, each given the clean ones before, and no sampler of "
    "this engine that does so has been compared with it.",
    "Flux2DevBundle": "its pipeline of FLUX.2 dev has not been compared with the model that trains, and is not called.",
    "MiniMaxH3Bundle": "no pipeline of MiniMax-H3 with its two schedules has been compared with the model that trains, "
    "and none is called.",
}
"""Class names of models that no engine serves, and why."""


def family_is_served(
    bundles: tuple[str, ...],
    *,
    without: tuple[str, ...] = (),
    reasons: Mapping[str, str] | None = None,
) -> Rule:
    """The model is one of `bundles` (class names), which the engine runs natively, and has no image inputs unless it is
    one of the engine's `takes_media_of`, which are among them.

    without: subclasses of these that it does not run.

    reasons: class name, also of a subclass of these -> what of the engine keeps it from serving the model, as a
    sentence; besides `NOT_COMPARED`.
    """
    refused = {**NOT_COMPARED, **(reasons or {})}

    def rule(own: Part, run: Run) -> Messages:
        bundle = run.policy.bundle
        names = bundle.class_names
        known = own.ability("takes_media_of") or () if bundle.ability("needs_media") else bundles
        if not bundle.takes_any and (not set(names) & set(known) or set(names) & {*without, *refused}):
            why = next((reason for name, reason in refused.items() if name in names), None)
            said = f"serves {', '.join(bundles)}, the recipe has {bundle.name}."
            if why is not None:
                said = f"does not serve {bundle.name}: {why}"
            yield f"{own.name} {said} Set {own.at}._target_: {REPLICA}, which serves every family."

    return rule


def kernel_is_served(kernels: tuple[str, ...]) -> Rule:
    """Stochastic steps use one of `kernels` (class names), and log-probs are averaged over the elements of a latent."""

    def rule(own: Part, run: Run) -> Messages:
        for pipeline in run.policy.pipelines.values():
            kernel = pipeline.inner.get("strategy")
            if kernel is None or run.sampling.get("eta", 0.0) == 0:
                continue
            if not any(path.endswith(kernels) for path in (kernel.path, *kernel.lineage)):
                yield (
                    f"{own.name} steps with {' or '.join(kernels)}, but {kernel.at} is {kernel.name}. Set "
                    f"{kernel.at}._target_ to one of them, or {own.at}._target_: {REPLICA}."
                )
            elif kernel.get("reduction", "mean") != "mean":
                yield (
                    f"{own.name} averages log-probs over the elements of a latent, but {kernel.at}.reduction = "
                    f"{kernel.get('reduction')}. Set it to mean."
                )

    return rule


def experts_switch_as_released(own: Part, run: Run) -> Messages:
    """Two experts share the noise levels as the checkpoint says, which is what the engine reads."""
    if (boundary := run.policy.bundle.get("boundary_ratio")) is not None:
        at = run.policy.bundle.at
        yield (
            f"{at}.boundary_ratio = {boundary}, but {own.name} reads it in the checkpoint's model_index.json. Take it "
            f"out, write it there, or set {own.at}._target_: {REPLICA}."
        )


def sampling_is_served(own: Part, run: Run) -> Messages:
    """The engine supports all sampling settings of the recipe."""
    for name, neutral in (("post_solver", "euler"), ("trajectory_precision", "fp32")):
        value = run.sampling.get(name, neutral)
        if value != neutral:
            yield f"{run.sampling.at}.{name} = {value} is not served by {own.name}. Set it to {neutral}."
    solver = "euler" if run.evaluation is None else run.evaluation.get("post_solver", "euler")
    if solver != "euler":
        yield f"eval.post_solver = {solver} is not served by {own.name}. Set it to euler."
