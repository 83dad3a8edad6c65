"""BAGEL's modules, and what training needs to know of them."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from unirl.models.bagel.configuration import MODEL_FILE, VAE_FILE, BagelConfig, file_shapes
from unirl.models.bagel.images import Sides
from unirl.models.bagel.language import BagelLanguage, MarkIds
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.transformer import GENERATION, Qwen2MoTForCausalLM
from unirl.models.bagel.vae import AutoEncoder
from unirl.models.packed.bundle import PackedBundle
from unirl.models.packed.weights import fill
from unirl.models.token_scores import CHUNK_LOGITS
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.precision import dtype_named

Trains = Literal["generation", "understanding", "both"]

VISION_SIDES = (224, 980)
"""Shortest and longest side of an image that the vision tower sees."""

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@bounded("bundle")
class BagelBundle(PackedBundle):
    """Decoder, vision tower, autoencoder and tokenizer of a checkpoint in BAGEL's published layout.

    pretrained_model: a folder or a hub id. dtype: of all weights but the autoencoder's, which has `vae_dtype`.
    trains: "generation" is the expert of latents, "understanding" that of words with embedding and output projection.
        The ways of images into and out of the decoder stay frozen. With LoRA it says which layers are adapted.
    chunk_logits: logits that scoring holds at once, see `unirl.models.token_scores`.
    defers_weights: leave the decoder's weights to the backend, which reads this rank's part of each.
    Raises CheckpointError or ConfigError before weights are read if the folder is incomplete or its sizes disagree.
    """

    component: ClassVar[str] = "language_model"
    published_prefix: ClassVar[str] = "language_model."
    family: ClassVar[str] = "BAGEL"
    index_file: ClassVar[str] = "llm_config.json"
    latent_patch: ClassVar[int] = 2
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
        defers_weights: bool = False,
    ) -> None:
        weights_dtype, vae_weights_dtype = dtype_named(dtype, "dtype"), dtype_named(vae_dtype, "vae_dtype")
        super().__init__(pretrained_model, device, defers_weights=defers_weights)
        self.trains = trains
        self.config = BagelConfig.of_folder(self.folder)
        self.tokenizer = self.load_tokenizer()
        self.marks = MarkIds.of(self.tokenizer, self.config.language.vocab_size, self.folder.path)
        with torch.device("meta"):
            self.bagel, self.vae = Bagel(self.config), AutoEncoder(self.config.vae)
        self.files, vae_files = (
            dict.fromkeys(file_shapes(path), path)
            for path in (self.folder.path / MODEL_FILE, self.folder.path / VAE_FILE)
        )
        later = {self.published_prefix} if defers_weights else set()
        parts = [(f"{name}.", part, weights_dtype) for name, part in self.bagel.named_children()]
        fill(
            [part for part in parts if part[0] not in later],
            self.files,
            deferred=[part for part in parts if part[0] in later],
            device=self.device,
            owner="a Bagel",
        )
        self.bagel.eval()
        fill([("", self.vae, vae_weights_dtype)], vae_files, device=self.device, owner="an AutoEncoder")
        ends = {"generation": (GENERATION,), "understanding": ("",), "both": ("", GENERATION)}[trains]
        attention = tuple(f"{name}{end}" for end in ends for name in _LINEAR)
        self.lora_target_modules = attention + tuple(f"mlp{end}.{name}" for end in ends for name in _MLP)
        self.finish(self.decoder.lm_head, chunk_logits)
        self.model = BagelLanguage(self.bagel, self.marks)

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

    def does_train(self, name: str) -> bool:
        """True for the parameters of the chosen experts."""
        return self.trains == "both" or (self.trains == "generation") == (GENERATION in name)

    @property
    def decoder(self) -> Qwen2MoTForCausalLM:
        """Both experts, and the output projection."""
        return self.bagel.language_model

    def new_decoder(self) -> Qwen2MoTForCausalLM:
        return Qwen2MoTForCausalLM(self.config.language)

    # What the text stage asks ----------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self.config.language.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end of a turn."""
        return (self.marks.text_end,)
