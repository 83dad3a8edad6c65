"""The modules of a MiniMax-H3 folder, and what training needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.models.experts import RankFollowing
from unirl.models.extras import from_extra
from unirl.models.minimax_h3.text import MiniMaxH3TextEncoders, read_part
from unirl.types.bounds import NonNegative, Positive, bounded

with from_extra("diffusers"):
    import diffusers
    from transformers import Qwen3VLForConditionalGeneration

try:
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import AutoencoderKLMiniMaxH3Audio
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
except ImportError as error:
    raise ImportError(
        f"MiniMax-H3 needs diffusers 0.40 or later, which has its models; installed is {diffusers.__version__}. Update "
        "it: pip install 'diffusers>=0.40'"
    ) from error


@bounded("bundle")
class MiniMaxH3Bundle(RankFollowing, DiffusersBundle):
    """Transformer, both autoencoders, Qwen3-VL and its tokenizer, see `DiffusersBundle`.

    A folder of a pipeline of blocks. Of its two transformers the one that makes videos of texts is read, not
    `transformer_ref`, which is given references. vae_dtype: "fp16" decodes videos under autocast, as the stock pipeline
    does on a GPU; all else of both autoencoders stays float32, whatever it says. shortest_s, longest_s: lengths of the
    videos that the checkpoint was trained on, in seconds; others are refused.
    """

    recipe_rules = "unirl.models.minimax_h3.rules"
    family = "MiniMax-H3"
    takes_attention_backend = True
    makes_sound = True
    index_file = "modular_model_index.json"
    pipeline_classes = ("MiniMaxH3ModularPipeline",)
    components = {
        "transformer": trained(MiniMaxH3Transformer3DModel),
        "vae": autoencoder(AutoencoderKLMiniMaxH3),
        "audio_vae": autoencoder(AutoencoderKLMiniMaxH3Audio),
        "text_encoder": text_encoder(Qwen3VLForConditionalGeneration),
        "tokenizer": processor(),
    }
    unread = ("transformer_ref", "processor")
    text_class = MiniMaxH3TextEncoders
    block_class_names = ("MiniMaxH3TransformerBlock", "MiniMaxH3TokenRefinerBlock")
    lora_target_modules = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    latent_divisor = 32
    frame_divisor = 17
    frame_rest = 5

    # Any: the keywords of DiffusersBundle.
    def __init__(
        self, pretrained_model: str, *, shortest_s: NonNegative = 5.0, longest_s: Positive = 15.0, **options: Any
    ) -> None:
        self.shortest_s, self.longest_s = shortest_s, longest_s
        super().__init__(pretrained_model, **options)

    def check_index(self) -> None:
        """Reads the shifts of both schedules. Raises CheckpointError for a folder without that of the sound."""
        audio = self.folder.config("audio_scheduler", "scheduler_config.json")
        self.shift_ratio = float(self.scheduler_config["shift"]) / float(audio["shift"])
        """Shift of the video's schedule over the sound's, see `unirl.models.minimax_h3.levels`."""

    def make_text(
        self, encoders: Mapping[str, Any | None], tokenizers: Mapping[str, Any | None]
    ) -> TextEncoders:  # Any: as in `DiffusersBundle`
        return super().make_text(read_part(encoders, self.pretrained_model), tokenizers)

    def after_loading(self) -> None:
        """Layers whose weights autocast would round at every call are rounded now: half the memory, the same bits."""
        if self.vae_dtype != torch.float32:
            for module in self.vae.decoder.modules():
                if isinstance(module, torch.nn.Linear):
                    module.to(self.vae_dtype)

    @property
    def audio_vae(self) -> Any:  # Any: as in `DiffusersBundle.load`
        """The autoencoder of waveforms."""
        return self.modules["audio_vae"]
