"""HunyuanImage3's modules, and what training needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from unirl.models.bundle import Bundle
from unirl.models.causal_lm.peft_export import write_peft_adapter
from unirl.models.causal_lm.tokenizer import load_tokenizer
from unirl.models.hunyuan_image3.configuration import HunyuanImage3Config
from unirl.models.hunyuan_image3.language import HunyuanImage3Language
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.sizes import sizes
from unirl.models.hunyuan_image3.template import Style, WordIds
from unirl.models.hunyuan_image3.transformer import HunyuanImage3Decoder
from unirl.models.loading import open_model_folder
from unirl.models.merged_export import check_fits, copy_others, export_folder, only_component
from unirl.models.packed.language import TextCache
from unirl.models.packed.weights import fill, replace_weights, weight_files
from unirl.models.token_scores import CHUNK_LOGITS, ScoringHead
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.precision import dtype_named

COMPONENT = "transformer"
"""Name of the one module that trains."""

Trains = Literal["attention", "all"]

GENERATION_CONFIG = "generation_config.json"

_MOST_NAMES = 8
"""In an error: each expert of each layer has weights."""


@bounded("bundle")
class HunyuanImage3Bundle(Bundle):
    """Decoder, ways of images, autoencoder and tokenizer of a checkpoint in HunyuanImage3's published layout.

    pretrained_model: a folder or a hub id. dtype: of all weights but the autoencoder's, which has `vae_dtype`.
    trains: "attention" of every block, or "all" of the decoder, its experts included. With LoRA it does not matter:
        the projections of attention are adapted.
    decoder_device: None is `device`. On "cpu" the decoder stays mapped to its files until the backend shards it, block
        by block: no device holds it whole.
    chunk_logits: logits that scoring holds at once, see `unirl.models.token_scores`.
    Raises CheckpointError or ConfigError before weights are read if the folder is incomplete or of another variant.
    """

    family: ClassVar[str] = "HunyuanImage3"
    index_file: ClassVar[str] = GENERATION_CONFIG
    recipe_rules: ClassVar[str] = "unirl.models.diffusers_pipeline.rules"
    latent_divisor: ClassVar[int] = 16
    """Pixels that height and width divide into."""
    latent_patch: ClassVar[int] = 1
    frame_divisor: ClassVar[int] = 0
    reads_media: ClassVar[bool] = True
    block_class_names: ClassVar[tuple[str, ...]] = ("HunyuanImage3DecoderLayer",)
    lora_target_modules: ClassVar[tuple[str, ...]] = ("qkv_proj", "o_proj")

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        vae_dtype: str = "fp32",
        trains: Trains = "attention",
        decoder_device: str | None = None,
        chunk_logits: PositiveInt = CHUNK_LOGITS,
    ) -> None:
        weights_dtype, vae_weights_dtype = dtype_named(dtype, "dtype"), dtype_named(vae_dtype, "vae_dtype")
        self.pretrained_model = pretrained_model
        self.trains = trains
        self.device = torch.device(device)
        self.folder = open_model_folder(pretrained_model, ())
        self.config = HunyuanImage3Config.of_folder(self.folder)
        generation = self.folder.json(GENERATION_CONFIG)
        self.style: Style = "instruct" if generation.get("sequence_template") == "instruct" else "pretrain"
        """How prompts are written."""
        self.drops_thoughts = bool(generation.get("drop_think", False))
        """True if an image is made without what was thought before its caption."""
        self.sizes = sizes(self.config.base_size)
        """Sizes of images, in the order of their words."""
        self.tokenizer = load_tokenizer(self.folder.path, model_type="qwen2")
        self.words = WordIds.of(
            self.tokenizer,
            self.config.decoder.vocab_size,
            self.config.base_size,
            len(self.sizes),
            self.folder.path,
        )
        with torch.device("meta"):
            self.decoder, self.images = HunyuanImage3Decoder(self.config.decoder), ImageParts(self.config)
        vae = self.images.vae
        del self.images.vae
        self._files = weight_files(self.folder.path)
        parts = [("", self.decoder, weights_dtype), ("", self.images, weights_dtype), ("vae.", vae, vae_weights_dtype)]
        fill(parts, self._files)
        self.images.vae = vae
        self.images.to(self.device)
        self.decoder.to(self.device if decoder_device is None else decoder_device)
        self.head = ScoringHead(self.decoder.lm_head, chunk_logits=chunk_logits)
        self.decoder.lm_head = self.head
        for name, parameter in self.decoder.named_parameters():
            parameter.requires_grad_(trains == "all" or ".self_attn." in name)
        self.model = HunyuanImage3Language(self.decoder, self.images, self.words)
        """The language model alone, as `unirl.models.ar` calls it."""

    # What the text stage asks ----------------------------------------------------------------------------------------

    @property
    def is_packable(self) -> bool:
        """Replay never pads."""
        return True

    @property
    def vocabulary_size(self) -> int:
        """Words that the model has logits for."""
        return self.config.decoder.vocab_size

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        return self.config.decoder.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end of everything."""
        return (self.words.end,)

    def new_cache(self) -> TextCache:
        """An empty KV cache."""
        return TextCache()

    # What training asks ----------------------------------------------------------------------------------------------

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The decoder."""
        return {COMPONENT: self.decoder}

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

        Rows of an adapted `qkv_proj` are in the published order, one group of heads after the other.
        lora_state: {"transformer": state of peft's get_peft_model_state_dict}. Raises ContractError for another
        component, an empty state, or tensors of another rank.
        """
        write_peft_adapter(
            folder,
            only_component(lora_state, COMPONENT, "HunyuanImage3"),
            base=self.pretrained_model,
            rank=rank,
            alpha=alpha,
            target_modules=target_modules,
        )

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole folder in the published layout with the given weights; all else is the checkpoint's, copied.

        state: {"transformer": name -> tensor}, LoRA already merged. Tensors keep their dtype. Raises ConfigError if
        `folder` is the checkpoint itself, CheckpointError where names or shapes do not fit.
        """
        weights = only_component(state, COMPONENT, "HunyuanImage3")
        target = export_folder(folder, self.folder.path)
        with torch.device("meta"):
            # Not ours, whose names adapters may have changed.
            expected = HunyuanImage3Decoder(self.config.decoder).state_dict()
        check_fits(weights, expected, self.folder.path, most=_MOST_NAMES)
        copy_others(self.folder.path, target, *{file.name for file in self._files.values()})
        replace_weights(self._files, weights, target)
