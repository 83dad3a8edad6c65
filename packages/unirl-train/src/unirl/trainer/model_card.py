"""Writes the model card of an export: what the weights are, how to load them, how they were trained, and their
scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.config.instantiation import TARGET
from unirl.config.runs import one_or_several, policy_sections
from unirl.config.schema import DEFAULT_POLICY
from unirl.train.backend.policies import CURRENT_POLICY
from unirl.trainer.versions import versions
from unirl.types.hub import is_hub_id
from unirl.types.weights import LostUpdate

CARD_FILE = "README.md"
SUMMARY_FILE = "summary.json"
_OF_ONE_MACHINE = ("run_dir", "resume", "resume_changes", "trackers")
"""Recipe keys that do not describe the weights."""

Values = Mapping[str, Any]  # Any: a recipe's values, or what JSON holds


def write_model_card(
    folder: Path,
    recipe: Values,
    state: Values,
    run_dir: Path,
    *,
    published: Values,
    merged: bool,
    policy: str = DEFAULT_POLICY,
    copy: str = CURRENT_POLICY,
    lost: LostUpdate | None = None,
    of_blocks: bool = False,
) -> None:
    """Write `README.md` into the folder of an export, in the format that model hubs read.

    published: the recipe as others may see it, shown at the end of the card; `recipe` is only used for the names of
    model and files. policy: the exported policy. copy: which copy of its weights. lost: how much of a merged LoRA was
    lost by rounding. of_blocks: True if the base model is a diffusers pipeline of blocks. state: the driver's state of
    the exported checkpoint. run_dir: its summary has the versions used in training. If the run has not ended there is
    no summary, and the card shows the versions of this process and says so.
    """
    of_policies = policy_sections(recipe)
    prefix, sections = of_policies[policy]
    base = sections["bundle"].get("pretrained_model")
    is_on_hub = bool(base) and not Path(str(base)).exists() and is_hub_id(str(base))
    loads = _OF_BLOCKS if of_blocks else _PLAIN
    library, usage = _loading(folder, f'"{base if is_on_hub else f"PATH/TO/{_shown(base)}"}"', loads)
    front = [f"library_name: {library}"] if library else []
    if is_on_hub:  # which model hubs link to
        front.append(f"base_model: {base}")
    front += ["tags:", "- unirl", "- reinforcement-learning", *([] if merged else ["- lora"])]
    sections = [
        "\n".join(["---", *front, "---"]),
        f"# {recipe['recipe']}, rollout {state['next_rollout']}",
        f"{_kind(sections, merged=merged)} of {_origin(sections['bundle'])}",
        *([f"## Load\n\n```python\n{usage}\n```"] if usage else []),
        *([f"## Rounding\n\n{lost}"] if lost is not None else []),
        f"## Training\n\n{_training(recipe, published, state, copy, one_or_several(sections, prefix, 'algorithm'))}",
        f"## Held-out figures\n\n{_figures(recipe, state)}",
        f"## Versions\n\n{_versions(run_dir)}",
        f"## Recipe\n\n{_recipe(published)}",
    ]
    (folder / CARD_FILE).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _kind(sections: Values, *, merged: bool) -> str:
    lora = sections["backend"].get("lora")
    if lora is None:
        return "All weights"
    numbers = ", ".join(f"{name} {lora[name]}" for name in ("rank", "alpha") if name in lora)
    return f"The whole model, with a LoRA ({numbers}) merged into the weights" if merged else f"A LoRA ({numbers})"


def _origin(bundle: Values) -> str:
    """What was trained: a base model, or a class that began without one."""
    base = bundle.get("pretrained_model")
    if not base:
        return (
            f"`{bundle.get(TARGET)}`, which began without a base model, trained with reinforcement learning by UniRL."
        )
    return f"`{_shown(base)}`, trained with reinforcement learning by UniRL. The base model's licence applies."


_PLAIN = "from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained({where})"
_OF_BLOCKS = (
    "from diffusers import ModularPipeline\n\npipe = ModularPipeline.from_pretrained({where})\npipe.load_components()"
)


def _loading(folder: Path, base: str, loads: str) -> tuple[str | None, str | None]:
    """The library of an export, recognised by its files, and the code that loads it. base: the base model, quoted.
    loads: the code that loads a pipeline of diffusers."""
    if (folder / "pytorch_lora_weights.safetensors").is_file():
        return "diffusers", f'{loads.format(where=base)}\npipe.load_lora_weights(".")  # this folder'
    if any((folder / file).is_file() for file in ("model_index.json", "modular_model_index.json")):
        return "diffusers", loads.format(where='"."') + "  # this folder"
    if (folder / "ema.safetensors").is_file():
        return None, (
            "from unirl.models.bagel.bundle import BagelBundle\n\n"
            'bundle = BagelBundle(".")  # this folder, in the layout of the published one'
        )
    generation = folder / "generation_config.json"
    if generation.is_file() and "sequence_template" in json.loads(generation.read_text(encoding="utf-8")):
        return None, (
            "from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle\n\n"
            'bundle = HunyuanImage3Bundle(".")  # this folder, in the layout of the published one'
        )
    if (folder / "adapter_config.json").is_file():
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if config["task_type"] is None:
            # For unified models: only HunyuanImage3 has one projection for queries, keys and values.
            is_fused = "qkv_proj" in config["target_modules"]
            module, name, part = (
                ("hunyuan_image3", "HunyuanImage3Bundle", "decoder") if is_fused else ("bagel", "BagelBundle", "bagel")
            )
            return "peft", (
                f"from peft import PeftModel\nfrom unirl.models.{module}.bundle import {name}\n\n"
                f'bundle = {name}({base})  # the base model\nPeftModel.from_pretrained(bundle.{part}, ".")'
                "  # adapts it in place"
            )
        return "peft", (
            f"from peft import PeftModel\n\n# base_model: {base}, loaded by transformers\n"
            'model = PeftModel.from_pretrained(base_model, ".")  # this folder'
        )
    if (folder / "config.json").is_file():
        return _loading_of_class(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return None, None


def _loading_of_class(config: Values) -> tuple[str | None, str | None]:
    """The same of a single model, by its configuration; nothing for one that neither library wrote."""
    if config.get("architectures") or config.get("model_type"):
        library, name = "transformers", (config.get("architectures") or ["AutoModel"])[0]
    elif config.get("_class_name"):
        library, name = "diffusers", config["_class_name"]
    else:
        return None, None
    return library, f'from {library} import {name}\n\nmodel = {name}.from_pretrained(".")  # this folder'


def _training(
    recipe: Values, published: Values, state: Values, copy: str, algorithms: Mapping[str, tuple[str, Values]]
) -> str:
    reward = published["reward"]
    weights = reward.get("weights") or {}
    scorers = [
        f"{name} ({node.get(TARGET)}), weight {json.dumps(weights.get(name, 1.0))}"
        for name, node in (reward.get("scorers") or {}).items()
        if node
    ]
    data = recipe["data"].get("path")
    rows = {
        "recipe": recipe["recipe"],
        "algorithm": ", ".join(str(node.get(TARGET)) for _, node in algorithms.values()),
        "reward": "; ".join(scorers) or reward.get(TARGET),
        "prompts": f"`{_shown(data)}`, content {state['data'].get('fingerprint', 'unknown')}",
        "checkpoint": f"after {state['next_rollout']} rollouts of {recipe['num_rollouts']}, {state['num_samples']:,} "
        "samples",
        "weights": "the trained policy" if copy == CURRENT_POLICY else f"the copy `{copy}` of the policy",
        "seed": recipe["seed"],
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _figures(recipe: Values, state: Values) -> str:
    done = {int(step): record for step, record in state["evaluations"].items()}
    upto = [step for step in sorted(done) if step <= state["next_rollout"]]
    if not upto:
        return "The run made no held-out evaluation before this checkpoint."
    last, first = done[upto[-1]], done[upto[0]]
    judged = recipe["eval"].get("policy")
    head = [f"after {step} rollouts" for step in dict.fromkeys((upto[0], upto[-1]))]
    table = ["| mean | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    for name in last["overall"]:
        values = [record["overall"].get(name) for record in (first, last)[: len(head)]]
        table.append(f"| {name} | " + " | ".join("-" if value is None else f"{value:.4f}" for value in values) + " |")
    where = f"{last['num_samples']} samples on `{_shown(recipe['eval'].get('prompts'))}`"
    whose = f"the copy `{judged}` of the policy" if judged else "the trained policy"
    return "\n".join([*table, "", f"By {whose}, {where}, one run with seed {recipe['seed']}."])


def _versions(run_dir: Path) -> str:
    summary = run_dir / SUMMARY_FILE
    if summary.is_file():
        found, whose = json.loads(summary.read_text(encoding="utf-8"))["versions"], "Of the training"
    else:
        found, whose = versions(), "Of the export (the run had not ended)"
    return f"{whose}: " + ", ".join(f"{name} {version}" for name, version in found.items()) + "."


def _recipe(recipe: Values) -> str:
    kept = {name: _without_folders(value) for name, value in recipe.items() if name not in _OF_ONE_MACHINE}
    text = json.dumps(kept, indent=2, default=str)
    how = "JSON is YAML: saved as `recipe.yaml`, it runs as `trainer recipe.yaml` where its paths exist."
    return f"{how}\n\n<details>\n<summary>{recipe['recipe']}</summary>\n\n```json\n{text}\n```\n\n</details>"


def _shown(place: object) -> str:
    """A hub id unchanged, a local file or folder by its last part, or two where the last says nothing."""
    path = Path(str(place)).expanduser()
    if not path.is_absolute() and not path.exists():
        return str(place)
    return "/".join(path.parts[-2:]) if path.name == "checkpoint" else path.name


def _without_folders(value: Any) -> Any:  # Any: a recipe's values
    """The value with absolute paths shortened to their last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return _shown(value) if isinstance(value, str) and value.startswith(("/", "~/")) else value
