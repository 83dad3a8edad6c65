"""Rules of guardrails: engine and trainer can be compared by what they sample. See `unirl.types.recipe`."""

from __future__ import annotations

import dataclasses

from unirl.config.runs import ComposedRun
from unirl.types.recipe import Messages


def parity_can_be_measured(run: ComposedRun) -> Messages:
    """With `guardrails.parity_interval`, the trainer can sample from the policy next to the engine, on held-out
    prompts."""
    interval = None if run.guardrails is None else run.guardrails.get("parity_interval")
    if run.guardrails is None or interval is None:
        return
    said, remove = f"guardrails.parity_interval = {interval}", "Remove guardrails.parity_interval."
    if run.guardrails.get("action") == "off":
        yield f"{said} does nothing with guardrails.action: off. Remove one of them."
    if run.evaluation is None:
        yield f"{said} compares samples of held-out prompts, but there is no eval section. Add eval.prompts."
    if run.is_staged or len(run.all_policies) > 1:
        yield f"{said} compares one stage of one policy, but this run has several. {remove}"
        return
    if run.stages[0].turns is not None or run.sampling.ability("samples_actions"):
        yield f"{said} compares single answers, but here an environment answers what is sampled. {remove}"
    if not run.engine.ability("has_own_weights"):
        yield f"{said} does nothing with {run.engine.name}, which samples with the model that trains. {remove}"
    if run.policy.ranks_per_sample > 1:
        option = run.policy.sharing_option
        yield f"{said} has the trainer sample, which ranks that share samples ({option}) do not. {remove}"
    if run.engine.get("drop_text_encoders"):
        yield (
            f"{said} has the trainer encode prompts too, but engine.drop_text_encoders: true frees what does. Remove "
            "one of them."
        )
    for field in dataclasses.fields(run.file.residency):
        if getattr(run.file.residency, field.name):
            yield (
                f"{said} has engine and trainer sample in turn, but residency.{field.name}: true lets something leave "
                "the device meanwhile. Remove one of them."
            )


RULES = (parity_can_be_measured,)
