"""LoRA weights in the folder that peft writes, for peft itself and for engines that load LoRA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from unirl.models.bundle import LoRASettings
from unirl.types.errors import ContractError
from unirl.types.weights import peft_names


def write_peft_adapter(
    folder: str, state: Mapping[str, Tensor], settings: LoRASettings, *, base: str, task_type: str | None = None
) -> None:
    """Writes an adapter for `PeftModel.from_pretrained(model, folder)`.

    state: names of peft's get_peft_model_state_dict -> tensor. base: name of the model that it adapts. Raises
    ContractError for an empty state, or tensors of another rank.
    """
    rank = settings.rank
    wrong = {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if tensor.shape[0 if name.endswith(".lora_A.weight") else 1] != rank
    }
    if not state or wrong:
        raise ContractError(f"LoRA weights of rank {rank} expected, got {wrong or 'none'}")
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted(settings.target_modules),
        "bias": "none",
        "inference_mode": True,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in peft_names(state).items()}
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
