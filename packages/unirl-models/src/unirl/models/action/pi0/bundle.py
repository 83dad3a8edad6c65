"""pi0 as a bundle: loaded from the released folder or one of transformers, and exported by the released names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.models.action.pi0.network import PI0Network
from unirl.models.action.robot import Robot
from unirl.models.action.robot_bundle import WEIGHT_FILES, RobotBundle
from unirl.models.causal_lm.construction import from_configuration
from unirl.models.causal_lm.tokenizer import load_tokenizer
from unirl.models.extras import from_extra
from unirl.models.loading import open_model_folder
from unirl.models.merged_export import check_fits, copy_others, export_folder
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.devices import has_values
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.precision import dtype_named
from unirl.types.storage import open_to_umask

with from_extra("transformers"):
    import transformers
    from safetensors import SafetensorError
    from safetensors.torch import save_file

WEIGHTS_FILE = "model.safetensors"
PREFIX = "policy."
"""Beginning of the names of what trains, before those of transformers."""
RELEASED = (
    ("model.vlm.language_model.embed_tokens.", "paligemma_with_expert.paligemma.lm_head."),
    ("model.vlm.vision_tower.", "paligemma_with_expert.paligemma.model.vision_tower.vision_model."),
    ("model.vlm.", "paligemma_with_expert.paligemma.model."),
    ("model.dit.embed_tokens.", "paligemma_with_expert.gemma_expert.lm_head."),
    ("model.dit.", "paligemma_with_expert.gemma_expert.model."),
    ("embed_action_time.", ""),
)
"""Beginnings of names in transformers -> in lerobot's files, where embeddings are kept as the heads that they are tied
to. The first that fits."""


def released_name(name: str) -> str:
    """The name in lerobot's files of a weight of transformers."""
    for ours, theirs in RELEASED:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


@bounded("bundle")
class PI0Bundle(RobotBundle):
    """pi0 (2410.24164), by transformers' PI0ForConditionalGeneration.

    pretrained_model: a folder or hub id, as lerobot publishes it (lerobot/pi0_base) or as transformers saves it.
    robot: what it moves, and its units.
    tokenizer: a folder or hub id with that of PaliGemma, which lerobot's folders lack; None: pretrained_model.
    max_text_tokens: tokens that a task may have, its first and last included.
    trains_vlm: train the vision-language model too; by default the expert alone, as pi_RL does.
    dtype: of the weights ("fp32", "bf16", "fp16"), whatever the file holds.
    Raises CheckpointError or ConfigError before weights are read if the folder is missing or of another model, or the
    robot does not fit it; CheckpointError for weights that do not fit.
    """

    block_class_names: tuple[str, ...] = ("GemmaDecoderLayer", "SiglipEncoderLayer")

    def __init__(
        self,
        pretrained_model: str,
        robot: Robot,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        tokenizer: str | None = None,
        max_text_tokens: PositiveInt = 48,
        trains_vlm: bool = False,
    ) -> None:
        self.pretrained_model = pretrained_model
        self.device = torch.device(device)
        self.robot = robot
        self.max_text_tokens = max_text_tokens
        self.folder = open_model_folder(pretrained_model, None, needs_weights=has_values(self.device))
        self.is_lerobot = self.folder.config.get("type") == "pi0"
        if not self.is_lerobot and self.folder.config.get("model_type") != "pi0":
            raise ConfigError(f"{self.folder.path} holds no pi0. Give a folder of lerobot or transformers that does.")
        self.config = self._configuration()
        self._check_robot()
        path = self.folder.path if tokenizer is None else Path(tokenizer).expanduser()
        self.tokenizer: Any = load_tokenizer(path)  # Any: transformers types its tokenizers loosely
        policy = self._load(dtype_named(dtype, "dtype")).to(self.device).eval()
        policy.model.vlm.requires_grad_(trains_vlm)
        # Embeddings of an expert that reads no tokens.
        policy.model.dit.get_input_embeddings().requires_grad_(False)
        if trains_vlm:
            # What follows the last layer's keys and values reaches no velocity.
            last = policy.model.vlm.language_model.layers[-1]
            for unused in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm):
                unused.requires_grad_(False)
            policy.model.vlm.language_model.norm.requires_grad_(False)
        self.network = PI0Network(policy, trains_vlm=trains_vlm)
        self._note_linear_layers()

    # What the pipeline asks ------------------------------------------------------------------------------------------

    @property
    def chain_shape(self) -> tuple[int, int]:
        """Moves and numbers that the expert draws."""
        return self.config.chunk_size, self.config.max_action_dim

    @property
    def image_side(self) -> int:
        """Pixels on a side of the images that the vision tower takes."""
        return int(self.config.vlm_config.vision_config.image_size)

    # What training asks ----------------------------------------------------------------------------------------------

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write a folder that `pretrained_model` takes, and with it lerobot or transformers, by the released names.

        state: {"policy": name -> tensor}. Raises CheckpointError if names or shapes do not fit, ConfigError if `folder`
        is the checkpoint itself.
        """
        weights = {
            name.removeprefix(PREFIX): tensor.detach().to("cpu") for name, tensor in state[self.component].items()
        }
        with torch.device("meta"):
            model = transformers.PI0ForConditionalGeneration(self.config)
        check_fits(weights, dict(model.named_parameters()), self.folder.path, most=8)
        target = export_folder(folder, self.folder.path)
        copy_others(self.folder.path, target, *WEIGHT_FILES)
        named = {released_name(name): tensor.contiguous() for name, tensor in weights.items()}
        save_file(named, target / WEIGHTS_FILE, metadata={"format": "pt"})
        open_to_umask(target)

    # Loading ---------------------------------------------------------------------------------------------------------

    def _configuration(self) -> Any:  # Any: transformers types its configurations loosely
        if not self.is_lerobot:
            return transformers.PI0Config.from_pretrained(self.folder.path)
        # lerobot names sizes as transformers does, and models by variants of which one was released.
        known = ("chunk_size", "max_state_dim", "max_action_dim", "num_inference_steps", "min_period", "max_period")
        own = self.folder.config
        return transformers.PI0Config(**{name: own[name] for name in known if name in own})

    def _check_robot(self) -> None:
        for name, wanted, most in (
            ("chunk", self.robot.chunk, self.config.chunk_size),
            ("action_size", self.robot.action_size, self.config.max_action_dim),
            ("state_size", self.robot.state_size or 0, self.config.max_state_dim),
        ):
            if wanted > most:
                raise ConfigError(f"bundle.robot.{name} = {wanted} is more than the {most} of {self.folder.path}.")

    def _load(self, dtype: torch.dtype) -> Any:  # Any: as above
        path, model_class = self.folder.path, transformers.PI0ForConditionalGeneration
        if not has_values(self.device):
            return from_configuration(model_class, path, dtype, self.device)
        try:
            found: Any = model_class.from_pretrained(path, config=self.config, dtype=dtype, output_loading_info=True)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} does not load: {error}") from error
        model, info = found
        wrong = {kind: sorted(map(str, info.get(kind, ()))) for kind in ("missing_keys", "mismatched_keys")}
        if any(wrong.values()):
            # transformers would go on with random weights in these places.
            raise CheckpointError(f"{path} does not hold all weights of pi0: {wrong}.")
        return model
