"""A diffusers pipeline folder as a bundle: its components checked, loaded whole, and exported again."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.models.bundle import Bundle, LoRASettings
from unirl.models.diffusers_pipeline.attention import compute_attention_by, refuse_absent
from unirl.models.diffusers_pipeline.components import Component, Role
from unirl.models.diffusers_pipeline.construction import from_configuration, without_weights
from unirl.models.diffusers_pipeline.export import write_lora, write_merged
from unirl.models.diffusers_pipeline.reading import can_defer, read_model, read_processor, stored_tensors
from unirl.models.diffusers_pipeline.resting import Resting
from unirl.models.diffusers_pipeline.rules import AttentionBackend, not_dispatched, span_problem
from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.models.diffusers_pipeline.tiling import work_in_tiles
from unirl.models.loading import open_pipeline_folder
from unirl.models.stored import Source, without_values
from unirl.models.token_plan import SpreadTokens, TokenPlan
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.devices import building_on, empty_cache, has_values
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import RecomputeContexts, TokenExchange


@bounded("bundle")
class DiffusersBundle(Bundle):
    """Base of the bundles of diffusers families: a family is a table of components and what training needs to know.

    pretrained_model: a diffusers pipeline folder or a hub id. dtype: of what trains, "fp32", "bf16" or "fp16";
    text_encoder_dtype: of the text encoders, None takes `dtype`; vae_dtype: of the VAE, float32 by default because
    half-precision decoding shows. device: where all of it lives; text_encoder_device: where the text encoders do
    instead, "cpu" to let them compute there; rest_text_encoders: keep them in host memory and on `device` only while
    the prompts of a rollout are encoded. trains: the components that train; None for all that can.
    vae_tile_pixels: media of more pixels on a side are encoded and decoded in tiles of that side, which bounds the
    VAE's memory and changes the seams; None does them at once. vae_tile_frames: how many frames at a time a VAE decodes
    that else decodes all at once (`decodes_at_once`); seams likewise. attention_backend: the kernel that computes the
    attention of what trains, by diffusers' name (unirl.models.diffusers_pipeline.rules has those with a gradient), None
    for torch's choice; rollout and replay share it. defers_weights: leave the weights of what trains
    to the backend, which reads this rank's part of each; folders without safetensors files are read at once.
    Only what trains keeps requires_grad. Raises CheckpointError or ConfigError before weights are read if the
    folder is missing, incomplete or of another pipeline class, and CheckpointError for weights that do not fit.
    """

    recipe_rules: ClassVar[str] = "unirl.models.diffusers_pipeline.rules"
    family: ClassVar[str]
    """Name for messages and cache keys."""
    pipeline_classes: ClassVar[tuple[str, ...]]
    """Classes of which its index must name one."""
    components: ClassVar[Mapping[str, Component]]
    """The components that the family uses."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Components of a released folder that no task of the family uses."""
    text_class: ClassVar[type[TextEncoders]]
    """How its text encoders read prompts."""
    block_class_names: ClassVar[tuple[str, ...]]
    """The transformer blocks, sharded, checkpointed and compiled one by one."""
    lora_target_modules: ClassVar[tuple[str, ...]]
    """Suffixes of the linear layers that LoRA adapts."""
    latent_divisor: ClassVar[int] = 16
    """Pixels that a side of the released checkpoints must divide into: VAE times patch."""
    latent_patch: ClassVar[int] = 0
    """Latent elements per token on a side where the family packs them itself; 0 where the transformer's patch_size says
    it."""
    frame_divisor: ClassVar[int] = 0
    """Frames per latent frame after the first (frames are this times k, plus `frame_rest`); 0 for a family of
    images."""
    frame_rest: ClassVar[int] = 1
    """Frames of a video beyond a multiple of `frame_divisor`."""
    decodes_at_once: ClassVar[bool] = False
    """True if the VAE holds all frames of a video while it decodes."""
    token_plan: ClassVar[TokenPlan | None] = None
    """How the tokens of what trains are spread over ranks; None where they cannot be."""
    takes_attention_backend: ClassVar[bool] = False
    """True if another kernel can compute the attention of what trains."""

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        vae_dtype: str = "fp32",
        *,
        text_encoder_dtype: str | None = None,
        text_encoder_device: str | None = None,
        rest_text_encoders: bool = False,
        trains: Sequence[str] | None = None,
        vae_tile_pixels: PositiveInt | None = None,
        vae_tile_frames: PositiveInt | None = None,
        attention_backend: AttentionBackend | None = None,
        defers_weights: bool = False,
    ) -> None:
        if vae_tile_frames is not None:
            problem = span_problem(vae_tile_frames, self.frame_divisor, decodes_at_once=self.decodes_at_once)
            if problem is not None:
                raise ConfigError(f"vae_tile_frames = {vae_tile_frames} {problem}")
        model_dtype = dtype_named(dtype, "dtype")
        if attention_backend is not None and not self.takes_attention_backend:
            raise ConfigError(f"attention_backend = {attention_backend} {not_dispatched(self.family)}")
        dtypes = {
            Role.TRAINED: model_dtype,
            Role.FROZEN: model_dtype,
            Role.AUTOENCODER: dtype_named(vae_dtype, "vae_dtype"),
            Role.TEXT: dtype_named(dtype if text_encoder_dtype is None else text_encoder_dtype, "text_encoder_dtype"),
        }
        self.pretrained_model = pretrained_model
        self.vae_dtype = dtypes[Role.AUTOENCODER]
        self.vae_tile_pixels = vae_tile_pixels
        self.vae_tile_frames = vae_tile_frames
        self.folder = open_pipeline_folder(
            pretrained_model, self.pipeline_classes, index_file=self.index_file, unread=self.unread
        )
        self.device = torch.device(device)
        kernel = attention_backend if has_values(self.device) else None
        if kernel is not None:
            refuse_absent(kernel, model_dtype, self.device)
        if rest_text_encoders and text_encoder_device is not None:
            raise ConfigError(
                f"rest_text_encoders encodes on {self.device}, text_encoder_device = {text_encoder_device} on another "
                "device. Remove one of them."
            )
        text_device = self.device if text_encoder_device is None else torch.device(text_encoder_device)
        if rest_text_encoders:
            text_device = torch.device("cpu")
        self.scheduler_config = self.folder.config("scheduler", "scheduler_config.json")
        self._trained: dict[str, nn.Module] = {}
        # Kept, because wrapping for training changes the class of a module.
        self._classes: dict[str, type[Any]] = {}  # Any: as in `load`
        self.check_index()
        present = self._require_components()
        trainable = [name for name, component in present.items() if component.role is Role.TRAINED]
        self._check_trains(trains, trainable)
        trained = trainable if trains is None else list(trains)
        self.defers_weights = defers_weights and (not has_values(self.device) or can_defer(self.folder, trained))
        """True if the parameters of what trains are on the meta device, for a backend to read."""

        self.modules: dict[str, Any] = {}  # Any: as in `load`
        """Every model but the text encoders by component."""
        self.processors: dict[str, Any] = {}  # Any: tokenizers and image processors share no base class
        """Every tokenizer and image processor by component."""
        # Of a component that is left out None, which an embedding depends on too.
        encoders: dict[str, Any | None] = dict.fromkeys(self._of(Role.TEXT))  # Any: as in `load`
        for name, component in present.items():
            if component.role is Role.PROCESSOR:
                self.processors[name] = self.load_processor(name)
            elif component.role is Role.TEXT:
                encoders[name] = self.load(name, component, dtypes[component.role], text_device)
            else:
                does_train = name in trained
                model = self.load(name, component, dtypes[component.role], self.device, trains=does_train)
                self.modules[name] = _arranged(model) if component.role is Role.AUTOENCODER else model
        if kernel is not None:
            for name in trainable:
                compute_attention_by(self.modules[name], kernel)
        if vae_tile_pixels is not None:
            work_in_tiles(self.vae, vae_tile_pixels)
        tokenizers = [name for name in self._of(Role.PROCESSOR) if name.startswith("tokenizer")]
        self.text = self.make_text(encoders, {name: self.processors.get(name) for name in tokenizers})
        """Text encoders and tokenizers."""
        if rest_text_encoders:
            self.text.resting = Resting(self.device)
        self.after_loading()

    @property
    def transformer(self) -> Any:  # Any: as in `load`
        """The model that trains, the first of several."""
        return self.modules["transformer"]

    @property
    def vae(self) -> Any:  # Any: as in `load`
        """The autoencoder."""
        return self.modules["vae"]

    def after_loading(self) -> None:
        """What a family checks or changes once everything is loaded."""

    # Loading ---------------------------------------------------------------------------------------------------------

    def check_index(self) -> None:
        """Raises ConfigError for settings of the folder that the family cannot use. Before weights are read."""

    def refuse_mean_flow(self) -> None:
        """Raises ConfigError for a mean-flow transformer, for families that released one besides the usual."""
        if self.folder.config("transformer").get("use_meanflow"):
            raise ConfigError(
                f"{self.pretrained_model} is a mean-flow checkpoint, whose velocity depends on the next noise level "
                "too. Use one with use_meanflow: false in transformer/config.json."
            )

    def leaves_out(self) -> Collection[str]:
        """Components that are not loaded even where the folder has them."""
        return ()

    def make_text(
        self, encoders: Mapping[str, Any | None], tokenizers: Mapping[str, Any | None]
    ) -> TextEncoders:  # Any: models and tokenizers of transformers
        """What reads prompts, of the text encoders and tokenizers by component; what is left out is None."""
        return self.text_class(encoders, tokenizers, **self.text_options)

    @property
    def text_options(self) -> dict[str, Any]:  # Any: keywords of the family's `text_class`
        """What else its text encoders are made of."""
        return {}

    def _require_components(self) -> dict[str, Component]:
        """The components to load, checked to be in the folder, of these classes and with weights. Reads no weights.

        Raises CheckpointError or ConfigError naming the component, what is wrong and what to do.
        """
        present = {}
        for name, component in self.components.items():
            is_there = self.folder.class_of(name) is not None
            if name in self.leaves_out() or (component.is_optional and not is_there):
                continue
            present[name] = component
            if component.role is not Role.PROCESSOR:
                self.folder.require(name, component.class_names, needs_weights=has_values(self.device))
            elif not is_there or not (self.folder.path / name).is_dir():
                raise CheckpointError(
                    f"{self.folder.path} has no {name}/. Use a complete {' or '.join(self.pipeline_classes)} folder."
                )
        return present

    def _of(self, role: Role) -> list[str]:
        return [name for name, component in self.components.items() if component.role is role]

    def _check_trains(self, trains: Sequence[str] | None, trainable: Sequence[str]) -> None:
        if trains is not None and (not trains or set(trains) - set(trainable)):
            raise ConfigError(f"trains = {list(trains)}: of this checkpoint {list(trainable)} can train. Name some.")

    def load(
        self,
        name: str,
        component: Component,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trains: bool = False,
    ) -> Any:  # Any: a model of diffusers or of transformers, which share `from_pretrained` but no base class
        """A component in evaluation mode on the device, frozen unless it trains.

        Raises CheckpointError if it does not load, or if a weight of the model is not in the file.
        """
        path, model_class = self.folder.path / name, component.model_class
        if model_class is None:
            raise ContractError(f"{name} is a processor, which has no weights")
        if trains and self.defers_weights:
            model = without_weights(model_class, path, dtype, device)
        elif has_values(self.device):
            model = read_model(path, model_class, dtype, device).to(device).eval()
        else:
            with building_on(device, of=self.device) as place:
                model = from_configuration(model_class, path, dtype, place)
        if trains:
            self._trained[name], self._classes[name] = model, model_class
            return model
        return model.requires_grad_(False)

    def stored_weights(self) -> dict[str, dict[str, Source]]:
        """Where each weight of what trains is, see unirl.types.protocols.models.DefersWeights."""
        found: dict[str, dict[str, Source]] = {}
        for name, module in self._trained.items():
            if not has_values(self.device):
                found[name] = {**without_values(module)}
                continue
            found[name] = stored_tensors(module, self.folder.path / name)
        return found

    def load_processor(self, name: str) -> Any:  # Any: tokenizers and image processors share no base class
        """A tokenizer or image processor, see `read_processor`."""
        return read_processor(self.folder, name)

    # What adapters and training ask ----------------------------------------------------------------------------------

    def drop_text_encoders(self) -> None:
        """Frees the text encoders (most of a checkpoint's memory). Prompts in an embedding cache still encode."""
        self.text.drop()
        gc.collect()
        empty_cache(self.device)

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The components that were loaded to train."""
        return dict(self._trained)

    def spread_tokens(self, exchange: TokenExchange) -> RecomputeContexts:
        """See unirl.types.protocols.models.SpreadsTokens. Raises ConfigError for a family without a plan."""
        if self.token_plan is None:
            raise ConfigError(f"topology.sp = {exchange.size}: {self.family} has no token plan. Set topology.sp: 1.")
        return SpreadTokens(self._trained, self.token_plan, exchange).recompute_contexts

    def write_lora(self, folder: str, lora_state: Mapping[str, Mapping[str, Tensor]], settings: LoRASettings) -> None:
        """`pytorch_lora_weights.safetensors` for `load_lora_weights(folder)` of the pipeline class."""
        self._check_components(lora_state)
        write_lora(folder, lora_state, settings)

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole pipeline folder with the given weights; all else is the checkpoint's, copied.

        state: component -> name -> tensor, of every component that trains, LoRA already merged; buffers may be absent.
        Tensors keep their dtype. Raises CheckpointError if a parameter is missing or does not belong.
        """
        self._check_components(state)
        buffers = {name: dict(module.named_buffers()) for name, module in self._trained.items()}
        write_merged(folder, self.folder, state, self._classes, buffers)

    def _check_components(self, state: Mapping[str, object]) -> None:
        if set(state) != set(self._trained):
            raise ContractError(f"{self.family} trains {sorted(self._trained)}; got the components {sorted(state)}")


def _arranged(vae: Any) -> Any:  # Any: as in `load`
    """A VAE as it is used: images without a change of layout around each convolution."""
    if not any(isinstance(module, nn.Conv3d) for module in vae.modules()):
        # A third less time on a CPU, tensor cores on a GPU.
        vae.to(memory_format=torch.channels_last)
    return vae
