"""Reads and checks a LoRA adapter that was sent to an engine's process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from unirl.rollout.engine.child.messages import LoadAdapter, Loaded
from unirl.rollout.engine.push import PushReceiver
from unirl.types.weights import WeightBucket, plain_names


@dataclass(frozen=True, eq=False)
class SentAdapter:
    """An adapter that fits the engine's model."""

    policy_version: int
    folder: Path
    """Folder in peft's format; other instances read it too."""
    tensors: Mapping[str, Tensor]
    """Tensors under the model's names."""
    config: Mapping[str, Any]  # Any: JSON
    """peft's adapter configuration."""
    num_bytes: int

    def loaded(self, num_layers: int | None) -> Loaded:
        """The answer once the engine uses the adapter. num_layers: layers that it changes; None if the engine does not
        report it."""
        return Loaded(self.policy_version, len(self.tensors), self.num_bytes, num_layers)


def read_adapter(message: LoadAdapter, pushes: PushReceiver) -> SentAdapter:
    """The adapter of a message. Raises WeightSyncError if it is older than the engine's policy, does not fit its model,
    or does not match its checksums."""
    folder = Path(message.folder)
    tensors = plain_names(load_file(folder / "adapter_model.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    bucket = WeightBucket(message.policy_version, tensors, tuple(message.specs))
    pushes.check_adapter(bucket, config["r"])
    return SentAdapter(message.policy_version, folder, tensors, config, bucket.num_bytes)
