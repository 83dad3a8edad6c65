"""Trained weights in the files that diffusers loads: a LoRA file, or a whole pipeline folder.

`load_lora_weights` of diffusers (0.37 and later) builds its LoraConfig from the JSON under "lora_adapter_metadata" in
the safetensors header, keys prefixed by the component; without it, alpha would be taken to equal the rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unirl.models.bundle import LoRASettings
from unirl.models.installed import MODULAR_INDEX
from unirl.models.loading import PipelineFolder
from unirl.models.merged_export import check_fits, export_folder
from unirl.types.errors import ContractError
from unirl.types.weights import PEFT_PREFIX

LORA_FILE = "pytorch_lora_weights.safetensors"


def write_lora(folder: str, lora_state: Mapping[str, Mapping[str, Tensor]], settings: LoRASettings) -> None:
    """Writes `LORA_FILE` into `folder` (made if absent). lora_state: component -> keys of peft, with or without the
    adapter's name -> tensor.

    Raises ContractError for an empty state, a key that is no LoRA weight, or a rank that the tensors contradict.
    """
    rank = settings.rank
    weights: dict[str, Tensor] = {}
    # Any: JSON values.
    metadata: dict[str, Any] = {}
    for component, state in lora_state.items():
        if not state:
            raise ContractError(f"there are no LoRA weights of {component} to export")
        for key, tensor in state.items():
            name = _plain_key(key)
            is_a = name.endswith(".lora_A.weight")
            if not is_a and not name.endswith(".lora_B.weight"):
                raise ContractError(f"{key!r} is no LoRA weight (... .lora_A.weight or .lora_B.weight)")
            found = tensor.shape[0 if is_a else 1]
            if found != rank:
                raise ContractError(f"{key} {tuple(tensor.shape)} has rank {found}; the export says rank = {rank}")
            weights[f"{component}.{name}"] = tensor.detach().to("cpu").contiguous()
        metadata |= {
            f"{component}.r": rank,
            f"{component}.lora_alpha": settings.alpha,
            f"{component}.target_modules": sorted(settings.target_modules),
            # diffusers 0.37 reads the patterns without asking whether they are there.
            f"{component}.rank_pattern": {},
            f"{component}.alpha_pattern": {},
        }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / LORA_FILE, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(metadata)})


def _plain_key(key: str) -> str:
    """ "base_model.model.x.lora_A.default.weight" and "x.lora_A.weight" both become the latter."""
    head, _, tail = key.removeprefix(PEFT_PREFIX).rpartition(".lora_")
    side, _, rest = tail.partition(".")
    return f"{head}.lora_{side}.{rest.rpartition('.')[2]}" if head else key


def write_merged(
    folder: str,
    source: PipelineFolder,
    state: Mapping[str, Mapping[str, Tensor]],
    model_classes: Mapping[str, type[Any]],  # Any: diffusers types `from_config` loosely
    buffers: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Writes a pipeline folder: the components of `source` copied, those of `state` written by save_pretrained.

    model_classes, buffers: of each component of `state`; the buffers fill what the state leaves out. Raises ConfigError
    if `folder` is `source`, CheckpointError if names or shapes do not fit a component's configuration.
    """
    target = export_folder(folder, source.path)
    merged = {
        name: _with_weights(source, name, model_classes[name], weights, buffers[name])
        for name, weights in state.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    own = [name for name in source.components if name in merged or (source.path / name).is_dir()]
    _write_index(target, source, own)
    for component in own:
        if component not in merged:
            shutil.copytree(source.path / component, target / component, dirs_exist_ok=True)
    for component, model in merged.items():
        model.save_pretrained(target / component)


def _write_index(target: Path, source: PipelineFolder, own: Collection[str]) -> None:
    """The index of `source`; in one that says whence each component is loaded, those of `own` lie in `target`."""
    if source.file != MODULAR_INDEX:
        shutil.copyfile(source.path / source.file, target / source.file)
        return
    index = dict(source.index)
    for name in own:
        library, class_name, spec = index[name]
        index[name] = [library, class_name, {**spec, "pretrained_model_name_or_path": str(target), "subfolder": name}]
    (target / source.file).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _with_weights(
    source: PipelineFolder,
    component: str,
    model_class: type[Any],
    state: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Any:  # Any: as the class
    """A model on the CPU with the weights of `state`, of which `buffers` fill what it leaves out."""
    with torch.device("meta"):
        model = model_class.from_config(source.config(component))
    expected = model.state_dict()
    full = {name: tensor for name, tensor in buffers.items() if name in expected} | dict(state)
    check_fits(full, expected, f"the {component} of {source.path}")
    full = {name: tensor.detach().to("cpu") for name, tensor in full.items()}
    model.load_state_dict(full, strict=True, assign=True)
    return model
