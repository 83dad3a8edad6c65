"""The modules of a Stable Diffusion 3 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unirl.models.loading import PipelineFolder, open_pipeline_folder
from unirl.models.sd3.export import write_lora, write_merged
from unirl.models.sd3.text import SD3TextEncoders
from unirl.types.errors import CheckpointError, ContractError
from unirl.types.precision import dtype_named

try:
    import transformers
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection, T5EncoderModel
except ImportError as error:
    raise ImportError(
        "unirl.models.sd3 needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error

logger = logging.getLogger(__name__)

PIPELINE_CLASS = "StableDiffusion3Pipeline"
CLIP_CLASSES = ("CLIPTextModelWithProjection",)
T5_CLASSES = ("T5EncoderModel",)

LORA_TARGET_MODULES = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""The projections of the joint attention, image and text side."""


class SD3Bundle:
    """Transformer, VAE, text encoders and tokenizers of one checkpoint, in evaluation mode.

    pretrained_model: a diffusers pipeline folder or a hub id. dtype: of the transformer, "fp32", "bf16" or "fp16";
    text_encoder_dtype: of the text encoders, None takes `dtype`; vae_dtype: of the VAE, float32 by default because
    half-precision decoding shows. device: where all of it lives. load_t5: False leaves the T5 encoder out even where
    the checkpoint has it; its part of the sequence is zeros then, as in diffusers.
    The transformer alone keeps requires_grad. Raises CheckpointError or ConfigError before weights are read where the
    folder is missing, incomplete or of another pipeline class, and CheckpointError for weights that do not fit.
    """

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        vae_dtype: str = "fp32",
        *,
        text_encoder_dtype: str | None = None,
        load_t5: bool = True,
    ) -> None:
        transformer_dtype = dtype_named(dtype, "dtype")
        text_dtype = dtype_named(dtype if text_encoder_dtype is None else text_encoder_dtype, "text_encoder_dtype")
        decoder_dtype = dtype_named(vae_dtype, "vae_dtype")
        folder = open_pipeline_folder(pretrained_model, PIPELINE_CLASS)
        has_t5 = load_t5 and folder.class_of("text_encoder_3") is not None
        _check_components(folder, has_t5=has_t5)

        self.pretrained_model = pretrained_model
        self.folder = folder
        self.device = torch.device(device)
        self.scheduler_config = folder.config("scheduler", "scheduler_config.json")
        self.transformer: SD3Transformer2DModel = _load(
            SD3Transformer2DModel, folder, "transformer", self.device, torch_dtype=transformer_dtype
        )
        self.vae: AutoencoderKL = _load(AutoencoderKL, folder, "vae", self.device, torch_dtype=decoder_dtype)
        clip = CLIPTextModelWithProjection
        self.text = SD3TextEncoders(
            clip=_load(clip, folder, "text_encoder", self.device, dtype=text_dtype),
            clip_2=_load(clip, folder, "text_encoder_2", self.device, dtype=text_dtype),
            t5=_load(T5EncoderModel, folder, "text_encoder_3", self.device, dtype=text_dtype) if has_t5 else None,
            tokenizer=_load_tokenizer(folder, "tokenizer"),
            tokenizer_2=_load_tokenizer(folder, "tokenizer_2"),
            tokenizer_3=_load_tokenizer(folder, "tokenizer_3") if has_t5 else None,
            width=self.transformer.config["joint_attention_dim"],
        )
        # Convolutions without a layout change around each: a third less time on a CPU, tensor cores on a GPU.
        self.vae.to(memory_format=torch.channels_last).requires_grad_(False)
        for encoder in self.text.modules():
            encoder.requires_grad_(False)

    # What the bundle holds -----------------------------------------------------------------------------------------

    @property
    def text_encoder(self) -> nn.Module | None:
        """First CLIP text encoder; None once dropped."""
        return self.text.clip

    @property
    def text_encoder_2(self) -> nn.Module | None:
        """Second CLIP text encoder; None once dropped."""
        return self.text.clip_2

    @property
    def text_encoder_3(self) -> nn.Module | None:
        """T5 encoder; None where the pipeline has none, and once dropped."""
        return self.text.t5

    @property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Tokenizer of the first CLIP encoder."""
        return self.text.tokenizer

    @property
    def tokenizer_2(self) -> transformers.PreTrainedTokenizerBase:
        """Tokenizer of the second CLIP encoder."""
        return self.text.tokenizer_2

    @property
    def tokenizer_3(self) -> transformers.PreTrainedTokenizerBase | None:
        """Tokenizer of the T5 encoder; None where the pipeline has none."""
        return self.text.tokenizer_3

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent element on a side."""
        return 2 ** (len(self.vae.config["block_out_channels"]) - 1)

    def drop_text_encoders(self) -> None:
        """Frees the text encoders (most of a checkpoint's memory). Prompts in an embedding cache still encode."""
        self.text.drop()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # What training asks ----------------------------------------------------------------------------------------------

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The transformer blocks, sharded, checkpointed and compiled one by one."""
        return ("JointTransformerBlock",)

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Suffixes of the eight attention projections."""
        return LORA_TARGET_MODULES

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The transformer."""
        return {"transformer": self.transformer}

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Writes `pytorch_lora_weights.safetensors` for `StableDiffusion3Pipeline.load_lora_weights(folder)`.

        lora_state: {"transformer": state of peft's get_peft_model_state_dict}. Raises ContractError for another
        component or a key that is no LoRA weight.
        """
        _check_only_transformer(lora_state)
        write_lora(folder, lora_state["transformer"], rank=rank, alpha=alpha, target_modules=target_modules)

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole pipeline folder with the given transformer weights; all else is the checkpoint's, copied.

        state: {"transformer": name -> tensor}, LoRA already merged; buffers may be absent. Tensors keep their dtype.
        Raises CheckpointError where a parameter is missing or does not belong.
        """
        _check_only_transformer(state)
        buffers = dict(self.transformer.named_buffers())
        write_merged(folder, self.folder, state["transformer"], buffers)


def _check_only_transformer(state: Mapping[str, object]) -> None:
    if set(state) != {"transformer"}:
        raise ContractError(f"SD3 trains one component, 'transformer'; got {sorted(state)}")


def _check_components(folder: PipelineFolder, *, has_t5: bool) -> None:
    folder.require("transformer", ("SD3Transformer2DModel",))
    folder.require("vae", ("AutoencoderKL",))
    folder.require("text_encoder", CLIP_CLASSES)
    folder.require("text_encoder_2", CLIP_CLASSES)
    if has_t5:
        folder.require("text_encoder_3", T5_CLASSES)
    for name in ("tokenizer", "tokenizer_2", *(["tokenizer_3"] if has_t5 else [])):
        class_name = folder.class_of(name)
        if class_name is None or not (folder.path / name).is_dir():
            raise CheckpointError(f"{folder.path} has no {name}/. Use a complete {PIPELINE_CLASS} folder.")


def _load(
    model_class: type[Any], folder: PipelineFolder, component: str, device: torch.device, **dtype: torch.dtype
) -> Any:  # Any: a model of diffusers or of transformers, which share `from_pretrained` but no base class
    """A component in evaluation mode on `device`. Every weight of the model must come from the file."""
    path = folder.path / component
    try:
        model, info = model_class.from_pretrained(path, output_loading_info=True, **dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} does not load as {model_class.__name__}: {error}") from error
    wrong = {kind: sorted(map(str, info.get(kind, ()))) for kind in ("missing_keys", "mismatched_keys")}
    if any(wrong.values()):
        # Both libraries would go on with random weights in these places.
        raise CheckpointError(f"{path} does not hold all weights of {model_class.__name__}: {wrong}. Fetch it again.")
    return model.to(device).eval()


def _load_tokenizer(folder: PipelineFolder, component: str) -> transformers.PreTrainedTokenizerBase:
    class_name = str(folder.class_of(component))
    path = folder.path / component
    tokenizer_class = vars(transformers).get(class_name) or getattr(transformers, class_name, None)
    if tokenizer_class is None:
        raise CheckpointError(f"{path}: transformers {transformers.__version__} has no class {class_name}.")
    try:
        return tokenizer_class.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} does not load as {class_name}: {error}") from error
