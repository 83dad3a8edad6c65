"""A policy that acts as a bundle: loaded from a folder or made anew, and exported again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.models.action.config import CONFIG_FILE, WEIGHTS_FILE, ActionConfig
from unirl.models.action.network import ActionNetwork
from unirl.models.bundle import Bundle
from unirl.models.merged_export import check_fits, export_folder
from unirl.types.bounds import Seed, bounded
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.precision import dtype_named
from unirl.types.storage import open_to_umask

NOISE_WEIGHTS = "head.noise."
"""Names of what chooses the deviations of a flow's steps begin with it."""


@bounded("bundle")
class ActionBundle(Bundle):
    """A network that acts.

    pretrained_model: a folder with config.json and model.safetensors. config: instead, the shape of one that is made
    with random weights from `seed`, for tasks that can be learnt from nothing.
    dtype: of the weights ("fp32", "bf16", "fp16"), whatever the file holds.
    noise_range: see `ActionConfig`; a checkpoint without a network for it gets one with random weights from `seed`.
    Raises ConfigError unless one of pretrained_model and config is given, CheckpointError for a folder that is missing
    or does not fit.
    """

    recipe_rules: ClassVar[str] = "unirl.models.action.rules"
    index_file: ClassVar[str] = "config.json"
    component: ClassVar[str] = "policy"
    """Name of the module that trains."""
    block_class_names: tuple[str, ...] = ("KeypointTrunk", "StateTrunk", "FlowHead", "BinsHead")
    lora_target_modules: tuple[str, ...] = ()

    def __init__(
        self,
        pretrained_model: str | None = None,
        config: ActionConfig | None = None,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        seed: Seed = 0,
        noise_range: tuple[float, float] | None = None,
    ) -> None:
        if (pretrained_model is None) == (config is None):
            raise ConfigError("bundle: give pretrained_model, or config for a policy with random weights; one of them.")
        self.device = torch.device(device)
        self.folder = None if pretrained_model is None else Path(pretrained_model).expanduser()
        found = config if config is not None else ActionConfig.read(Path(str(self.folder)))
        self.config = found.with_noise(noise_range)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = ActionNetwork(self.config)
        if self.folder is not None:
            self._load(self.folder / WEIGHTS_FILE)
        self.network.to(self.device, dtype_named(dtype, "dtype")).eval()

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Moves of a chunk, and numbers of a move."""
        return self.config.chunk, self.config.action_size

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """[C, H, W] of the images that it sees; None if it sees none."""
        return self.config.image_shape

    @property
    def state_size(self) -> int | None:
        """Numbers of the states that it reads; None if it reads none."""
        return self.config.state_size

    def trainable_modules(self) -> dict[str, nn.Module]:
        """All of it."""
        return {self.component: self.network}

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write a folder that `pretrained_model` takes. state: {"policy": name -> tensor}. Raises CheckpointError if
        names or shapes do not fit."""
        weights = {name: each.detach().to("cpu").contiguous() for name, each in state[self.component].items()}
        check_fits(weights, self.network.state_dict(), "the policy that was built")
        target = Path(folder) if self.folder is None else export_folder(folder, self.folder)
        target.mkdir(parents=True, exist_ok=True)
        save_file(weights, target / WEIGHTS_FILE)
        (target / CONFIG_FILE).write_text(self.config.as_json(), encoding="utf-8")
        open_to_umask(target)

    def _load(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Copy or export the folder again.")
        weights, made = load_file(path), self.network.state_dict()
        added = {name: value for name, value in made.items() if name.startswith(NOISE_WEIGHTS)}
        if not added.keys() & weights.keys():
            weights |= added
        check_fits(weights, made, path)
        self.network.load_state_dict(weights)
