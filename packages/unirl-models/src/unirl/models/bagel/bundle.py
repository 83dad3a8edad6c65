"""BAGEL's modules, and what training needs to know of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.models.bagel.configuration import MODEL_FILE, VAE_FILE, BagelConfig, file_shapes
from unirl.models.bagel.images import Sides
from unirl.models.bagel.language import BagelLanguage, MarkIds, TextCache
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.transformer import GENERATION
from unirl.models.bagel.vae import AutoEncoder
from unirl.models.bundle import Bundle
from unirl.models.causal_lm.peft_export import write_peft_adapter
from unirl.models.causal_lm.tokenizer import load_tokenizer
from unirl.models.loading import open_model_folder
from unirl.models.merged_export import check_fits, copy_others, export_folder, only_component
from unirl.models.token_scores import CHUNK_LOGITS, ScoringHead
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import CheckpointError
from unirl.types.precision import dtype_named

logger = logging.getLogger(__name__)

COMPONENT = "language_model"
"""Name of the one module that trains, and the beginning of its names in the published file."""

Trains = Literal["generation", "understanding", "both"]

VISION_SIDES = (224, 980)
"""Shortest and longest side of an image that the vision tower sees."""

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@bounded("bundle")
class BagelBundle(Bundle):
    """Decoder, vision tower, autoencoder and tokenizer of a checkpoint in BAGEL's published layout.

    pretrained_model: a folder or a hub id. dtype: of all weights but the autoencoder's, which has `vae_dtype`.
    trains: "generation" is the expert of latents, "understanding" that of words with embedding and output projection.
        The ways of images into and out of the decoder stay frozen. With LoRA it says which layers are adapted.
    chunk_logits: logits that scoring holds at once, see `unirl.models.token_scores`.
    Raises CheckpointError or ConfigError before weights are read if the folder is incomplete or its sizes disagree.
    """

    family: ClassVar[str] = "BAGEL"
    index_file: ClassVar[str] = "llm_config.json"
    recipe_rules: ClassVar[str] = "unirl.models.diffusers_pipeline.rules"
    latent_divisor: ClassVar[int] = 16
    """Pixels that height and width divide into."""
    latent_patch: ClassVar[int] = 2
    frame_divisor: ClassVar[int] = 0
    reads_media: ClassVar[bool] = True
    block_class_names: ClassVar[tuple[str, ...]] = ("Qwen2MoTDecoderLayer",)

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        vae_dtype: str = "fp32",
        trains: Trains = "generation",
        chunk_logits: PositiveInt = CHUNK_LOGITS,
    ) -> None:
        weights_dtype, vae_weights_dtype = dtype_named(dtype, "dtype"), dtype_named(vae_dtype, "vae_dtype")
        self.pretrained_model = pretrained_model
        self.trains = trains
        self.device = torch.device(device)
        self.folder = open_model_folder(pretrained_model, ())
        self.config = BagelConfig.of_folder(self.folder)
        self.tokenizer = load_tokenizer(self.folder.path, model_type="qwen2")
        self.marks = MarkIds.of(self.tokenizer, self.config.language.vocab_size, self.folder.path)
        with torch.device("meta"):
            bagel, vae = Bagel(self.config), AutoEncoder(self.config.vae)
        self.bagel = _loaded(bagel, self.folder.path / MODEL_FILE, weights_dtype, self.device)
        """Everything but the autoencoder."""
        self.vae = _loaded(vae, self.folder.path / VAE_FILE, vae_weights_dtype, self.device)
        self.head = ScoringHead(self.bagel.language_model.lm_head, chunk_logits=chunk_logits)
        self.bagel.language_model.lm_head = self.head
        for name, parameter in self.bagel.language_model.named_parameters():
            parameter.requires_grad_(trains == "both" or (trains == "generation") == (GENERATION in name))
        self.model = BagelLanguage(self.bagel, self.marks)
        """The language model alone, as `unirl.models.ar` calls it."""

    @property
    def vision_sides(self) -> Sides:
        """To which the vision tower's images are resized: as published, as far as its table of positions goes."""
        shortest, longest = VISION_SIDES
        vision = self.config.vision
        return Sides(shortest, min(longest, vision.patches_per_side * vision.patch_size), multiple=vision.patch_size)

    def turn(self, text: str) -> list[int]:
        """Words of a text between the marks of a turn."""
        return self.marks.turn(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # What training asks ----------------------------------------------------------------------------------------------

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """The linear layers of the experts that train."""
        ends = {"generation": (GENERATION,), "understanding": ("",), "both": ("", GENERATION)}[self.trains]
        attention = tuple(f"{name}{end}" for end in ends for name in _LINEAR)
        return attention + tuple(f"mlp{end}.{name}" for end in ends for name in _MLP)

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The decoder, of which the parameters of the chosen experts require a gradient."""
        return {COMPONENT: self.bagel.language_model}

    # What the text stage asks ----------------------------------------------------------------------------------------

    @property
    def is_packable(self) -> bool:
        """Replay never pads."""
        return True

    @property
    def vocabulary_size(self) -> int:
        """Words that the model has logits for."""
        return self.config.language.vocab_size

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        return self.config.language.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end of a turn."""
        return (self.marks.text_end,)

    def new_cache(self) -> TextCache:
        """An empty KV cache."""
        return TextCache()

    # Exports ---------------------------------------------------------------------------------------------------------

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Writes the adapter as peft does, by names of the published checkpoint.

        lora_state: {"language_model": state of peft's get_peft_model_state_dict}. Raises ContractError for another
        component, an empty state, or tensors of another rank.
        """
        state = {
            f"{COMPONENT}.{name}": tensor for name, tensor in only_component(lora_state, COMPONENT, "BAGEL").items()
        }
        write_peft_adapter(
            folder, state, base=self.pretrained_model, rank=rank, alpha=alpha, target_modules=target_modules
        )

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole folder in the published layout with the given weights; all else is the checkpoint's, copied.

        state: {"language_model": name -> tensor}, LoRA already merged. Tensors keep their dtype. Raises ConfigError
        if `folder` is the checkpoint itself, CheckpointError where names or shapes do not fit.
        """
        weights = {f"{COMPONENT}.{name}": tensor for name, tensor in only_component(state, COMPONENT, "BAGEL").items()}
        target = export_folder(folder, self.folder.path)
        with torch.device("meta"):
            # Not ours, whose names adapters may have changed.
            model = Bagel(self.config).state_dict()
        ours = {name: tensor for name, tensor in model.items() if name.startswith(f"{COMPONENT}.")}
        check_fits(weights, ours, self.folder.path)
        copy_others(self.folder.path, target, MODEL_FILE)
        rest = {name: tensor for name, tensor in load_file(self.folder.path / MODEL_FILE).items() if name not in ours}
        merged = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        save_file({**rest, **merged}, target / MODEL_FILE, metadata={"format": "pt"})


def _loaded(module: nn.Module, file: Path, dtype: torch.dtype, device: torch.device) -> Any:  # Any: the module's class
    """`module`, made on the meta device, with the weights of a file, frozen and in evaluation mode.

    Raises CheckpointError if a weight is missing or of another shape. What the module does not have is named in the
    log and left out.
    """
    expected = module.state_dict()
    shapes = file_shapes(file)
    wrong = {
        "missing": sorted(set(expected) - set(shapes)),
        "shape": sorted(name for name in set(expected) & set(shapes) if tuple(expected[name].shape) != shapes[name]),
    }
    if any(wrong.values()):
        raise CheckpointError(f"{file} does not hold the weights of a {type(module).__name__}: {wrong}.")
    unread = sorted(set(shapes) - set(expected))
    if unread:
        logger.warning("%s holds %d tensors that are not read: %s", file, len(unread), unread[:8])
    try:
        weights = load_file(file, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Fetch the folder again.") from error
    module.load_state_dict({name: weights.pop(name).to(dtype) for name in expected}, assign=True)
    return module.requires_grad_(False).eval()
