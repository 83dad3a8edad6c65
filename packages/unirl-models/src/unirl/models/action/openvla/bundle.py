"""OpenVLA-OFT as a bundle: loaded from the released folder, and exported by its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unirl.models.action.openvla.configuration import OpenVLAShape
from unirl.models.action.openvla.network import OpenVLANetwork
from unirl.models.action.robot import Robot
from unirl.models.action.robot_bundle import WEIGHT_FILES, RobotBundle
from unirl.models.causal_lm.tokenizer import load_tokenizer
from unirl.models.construction import UnfilledOnMeta, with_parameters_on_meta
from unirl.models.extras import from_extra
from unirl.models.loading import CONFIG_FILE, open_model_folder
from unirl.models.merged_export import check_fits, copy_others, export_folder
from unirl.models.stored import FileTensor, TensorFiles, check_state, file_tensors, safetensors_files
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.devices import has_values
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.precision import dtype_named
from unirl.types.storage import open_to_umask

with from_extra("transformers"):
    from transformers.initialization import no_init_weights

STEM = "model"
PREPROCESSOR = "preprocessor_config.json"
MEANS = ((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5))
STDS = ((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5))
"""Deviations, and above means, of DINOv2 and SigLIP, as the released preprocessor_config.json has them."""


@bounded("bundle")
class OpenVLABundle(RobotBundle):
    """OpenVLA (2406.09246) with the parallel decoding of OFT (2502.19645), in the layout of the released folders.

    pretrained_model: a folder or hub id, such as openvla/openvla-7b fine-tuned by OFT with discrete actions.
    robot: what it moves, and its units; `state_size` must be null, since states are not read.
    num_moves: moves that the checkpoint says at once; None: `robot.chunk`, those that are executed.
    max_text_tokens: tokens that a prompt may have, its first and last included.
    freeze_vision: whether the towers keep their weights.
    dtype: of the weights ("fp32", "bf16", "fp16"), whatever the file holds.
    Raises CheckpointError or ConfigError before weights are read if the folder is missing or of another model, or the
    robot does not fit it; CheckpointError for weights that do not fit.
    """

    block_class_names: tuple[str, ...] = ("LlamaDecoderLayer", "TowerBlock")

    def __init__(
        self,
        pretrained_model: str,
        robot: Robot,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        num_moves: PositiveInt | None = None,
        max_text_tokens: PositiveInt = 96,
        freeze_vision: bool = True,
    ) -> None:
        self.pretrained_model = pretrained_model
        self.device = torch.device(device)
        self.robot = robot
        self.num_moves = robot.chunk if num_moves is None else num_moves
        self.max_text_tokens = max_text_tokens
        self.folder = open_model_folder(pretrained_model, ("openvla",), needs_weights=has_values(self.device))
        self.shape = OpenVLAShape.read(self.folder.config, self.folder.path / CONFIG_FILE)
        self._check_robot()
        self.tokenizer: Any = load_tokenizer(self.folder.path, model_type="llama")  # Any: transformers types it loosely
        self.means, self.stds = self._statistics()
        self._files: TensorFiles | None = None
        self.network = self._load(dtype_named(dtype, "dtype"))
        self.network.vision_backbone.requires_grad_(not freeze_vision)
        # The logits of a chunk are rows of the head, which stays whole, as in the released fine-tuning.
        self._note_linear_layers(kept=["language_model.lm_head"])

    # What training asks ----------------------------------------------------------------------------------------------

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write a folder that `pretrained_model` takes, and OpenVLA's own code, with what is not trained copied.

        state: {"policy": name -> tensor}. Raises CheckpointError if names or shapes do not fit, ConfigError if `folder`
        is the checkpoint itself.
        """
        weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state[self.component].items()}
        check_fits(weights, self._empty("meta").state_dict(), self.folder.path, most=8)
        target = export_folder(folder, self.folder.path)
        copy_others(self.folder.path, target, *WEIGHT_FILES)
        files = self._weight_files()
        dtype = next(iter(weights.values())).dtype
        for name in files.files.keys() - weights.keys():
            weights[name] = _whole(FileTensor(files, name, dtype))
        save_file(weights, target / f"{STEM}.safetensors", metadata={"format": "pt"})
        open_to_umask(target)

    # Loading ---------------------------------------------------------------------------------------------------------

    def _check_robot(self) -> None:
        if self.robot.state_size is not None:
            raise ConfigError(
                f"bundle.robot.state_size = {self.robot.state_size}: this model reads an image and a task. Set it "
                "to null, and show images alone."
            )
        if self.robot.chunk > self.num_moves:
            raise ConfigError(
                f"bundle.robot.chunk = {self.robot.chunk} is more than bundle.num_moves = {self.num_moves}."
            )

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the six channels, [6, 1, 1]."""
        path = self.folder.path / PREPROCESSOR
        own = self.folder.json(PREPROCESSOR) if path.is_file() else {}
        found = []
        for name, default in (("means", MEANS), ("stds", STDS)):
            value = torch.tensor(own.get(name) or default, device=self.device)
            if value.shape != (2, 3):
                raise CheckpointError(f"{path}: {name} {list(value.shape)} must be three numbers for each tower.")
            found.append(value.view(6, 1, 1))
        return found[0], found[1]

    def _network(self) -> OpenVLANetwork:
        return OpenVLANetwork(self.shape, self.num_moves * self.robot.action_size)

    def _empty(self, device: str | torch.device) -> OpenVLANetwork:
        """Without adapters, and without values."""
        with torch.device(device), no_init_weights():
            return self._network()

    def _load(self, dtype: torch.dtype) -> OpenVLANetwork:
        if not has_values(self.device):
            return self._empty(self.device).to(dtype).eval()
        with torch.random.fork_rng(devices=[]), UnfilledOnMeta():
            network = self._network().to(dtype)
        with_parameters_on_meta(network, self.device)
        files = self._weight_files()
        found = file_tensors(network, files)
        # The last block and the norm of each tower have no part in what is read.
        unread = sorted(name for name in files.files.keys() - found.keys() if not name.startswith("vision_backbone."))
        check_state(network, found, self.folder.path, unread=unread)
        state = {name: _whole(source).to(self.device, dtype) for name, source in found.items()}
        network.load_state_dict(state, assign=True)
        return network.eval()

    def _weight_files(self) -> TensorFiles:
        files = safetensors_files(self.folder.path, STEM)
        if files is None:
            raise CheckpointError(f"{self.folder.path} has no {STEM}.safetensors. Fetch the folder again.")
        return TensorFiles(files)


def _whole(source: Any) -> Tensor:  # Any: a Source
    return source.read(tuple(slice(0, size) for size in source.shape)).clone()
