"""HunyuanImage3's modules, and what training needs to know of them."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn

from unirl.models.hunyuan_image3.configuration import HunyuanImage3Config
from unirl.models.hunyuan_image3.language import HunyuanImage3Language
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.sizes import sizes
from unirl.models.hunyuan_image3.template import Style, WordIds
from unirl.models.hunyuan_image3.transformer import Experts, HunyuanImage3Decoder, expert_stacks
from unirl.models.packed.bundle import PackedBundle
from unirl.models.packed.weights import fill, weight_files
from unirl.models.spread_experts import spread_stacked
from unirl.models.token_scores import CHUNK_LOGITS
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import ExpertExchange
from unirl.types.weights import PublishedParts

Trains = Literal["attention", "all"]

GENERATION_CONFIG = "generation_config.json"


@bounded("bundle")
class HunyuanImage3Bundle(PackedBundle):
    """Decoder, ways of images, autoencoder and tokenizer of a checkpoint in HunyuanImage3's published layout.

    pretrained_model: a folder or a hub id. dtype: of all weights but the autoencoder's, which has `vae_dtype`.
    trains: "attention" of every block, or "all" of the decoder, its experts included. With LoRA it does not matter:
        the projections of attention are adapted.
    decoder_device: None is `device`. On "cpu" the decoder stays in host memory until the backend shards it, block by
        block: no device holds it whole. All but the experts is mapped to its files.
    chunk_logits: logits that scoring holds at once, see `unirl.models.token_scores`.
    defers_weights: leave the decoder's weights to the backend, which reads this rank's part of each, wherever the
        decoder is said to be.
    Raises CheckpointError or ConfigError before weights are read if the folder is incomplete or of another variant.
    """

    component: ClassVar[str] = "transformer"
    family: ClassVar[str] = "HunyuanImage3"
    index_file: ClassVar[str] = GENERATION_CONFIG
    latent_patch: ClassVar[int] = 1
    spreads_experts: ClassVar[bool] = True
    expert_layers: ClassVar[tuple[str, ...]] = ("experts",)
    block_class_names: ClassVar[tuple[str, ...]] = ("HunyuanImage3DecoderLayer",)
    lora_target_modules: tuple[str, ...] = ("qkv_proj", "o_proj")
    most_names: ClassVar[int | None] = 8  # each expert of each layer has weights

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
        defers_weights: bool = False,
    ) -> None:
        weights_dtype, vae_weights_dtype = dtype_named(dtype, "dtype"), dtype_named(vae_dtype, "vae_dtype")
        super().__init__(pretrained_model, device, defers_weights=defers_weights)
        self.trains = trains
        self.config = HunyuanImage3Config.of_folder(self.folder)
        generation = self.folder.json(GENERATION_CONFIG)
        self.style: Style = "instruct" if generation.get("sequence_template") == "instruct" else "pretrain"
        """How prompts are written."""
        self.drops_thoughts = bool(generation.get("drop_think", False))
        """True if an image is made without what was thought before its caption."""
        self.sizes = sizes(self.config.base_size)
        """Sizes of images, in the order of their words."""
        self.tokenizer = self.load_tokenizer()
        self.words = WordIds.of(
            self.tokenizer,
            self.config.decoder.vocab_size,
            self.config.base_size,
            len(self.sizes),
            self.folder.path,
        )
        with torch.device("meta"):
            self._decoder, self.images = self.new_decoder(), ImageParts(self.config)
        self.vae = self.images.vae
        del self.images.vae
        self.files = weight_files(self.folder.path)
        decoder = [("", self.decoder, weights_dtype)]
        images = [("", self.images, weights_dtype), ("vae.", self.vae, vae_weights_dtype)]
        if defers_weights:
            fill(images, self.files, deferred=decoder, device=self.device, most=self.most_names, stacks=self.stacks())
        else:
            fill([*decoder, *images], self.files, most=self.most_names, stacks=self.stacks())
            self.decoder.to(self.device if decoder_device is None else decoder_device)
        self.images.vae = self.vae
        self.images.to(self.device)
        self.finish(self.decoder.lm_head, chunk_logits)
        self.model = HunyuanImage3Language(self.decoder, self.images, self.words)

    # What the text stage asks ----------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        return self.config.decoder.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end of everything."""
        return (self.words.end,)

    # What training asks ----------------------------------------------------------------------------------------------

    def does_train(self, name: str) -> bool:
        return self.trains == "all" or ".self_attn." in name

    @property
    def decoder(self) -> HunyuanImage3Decoder:
        """Transformer and output projection. Rows of an adapted `qkv_proj` are in the published order, one group of
        heads after the other."""
        return self._decoder

    def spread_experts(self, exchange: ExpertExchange) -> list[nn.Module]:
        """From now on each token goes to the ranks of its routed experts; the shared one is everywhere. Returns the
        modules that hold the stacks. Raises ConfigError if the ranks do not divide them."""
        found = [each for each in self.decoder.modules() if isinstance(each, Experts)]
        spread_stacked(found, self.config.decoder.num_experts, self.folder.path.name, exchange)
        return [*found]

    def stacks(self) -> dict[str, PublishedParts]:
        """Those of the routed experts."""
        return expert_stacks(self.decoder)

    def new_decoder(self) -> HunyuanImage3Decoder:
        return HunyuanImage3Decoder(self.config.decoder)
