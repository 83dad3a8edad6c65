"""Rules of engines that sample texts in other processes. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.types.recipe import Machine, Messages, Part, Run

_RELEASED_WITH_VISION = "Qwen/Qwen3.5-"


def has_linear_attention(run: Run) -> bool:
    """True if the policy's model has layers that carry a state from position to position."""
    return bool(run.policy.bundle.abilities.get("recurrent_class_names"))


def weights_have_the_names_of_the_folder(own: Part, run: Run, machine: Machine) -> Messages:
    """The language model of Qwen3.5 alone is pushed by other names than those of a folder with a vision tower."""
    bundle = run.policy.bundle
    model = str(bundle.node.get("pretrained_model"))
    if "Qwen35Bundle" in bundle.class_names and (model.startswith(_RELEASED_WITH_VISION) or _sees(model)):
        advice = (
            f"Set {bundle.at}._target_: unirl.models.qwen3_5.bundle.Qwen35VLBundle and its pipeline "
            "unirl.models.qwen3_5.pipeline.Qwen35VLPipeline, which keep the tower."
        )
        if "Qwen35MoeBundle" in bundle.class_names:
            advice = (
                "Sample with the model that trains (parts/engine=text_trainside), or give the language model alone."
            )
        yield (
            f"{own.name} loads {model} with its vision tower, and what {bundle.name} trains has other names there. "
            f"{advice}"
        )


def _sees(model: str) -> bool:
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # a hub id, or a folder that the model's own rules judge
    return isinstance(config, dict) and "vision_config" in config
