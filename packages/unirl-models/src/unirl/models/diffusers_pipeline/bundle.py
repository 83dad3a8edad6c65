"""A diffusers pipeline folder as a bundle: its components checked, loaded whole, and exported again."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unirl.models.bundle import Bundle
from unirl.models.diffusers_pipeline.export import write_lora, write_merged
from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.models.loading import open_pipeline_folder
from unirl.types.errors import CheckpointError, ContractError

try:
    import transformers
    from diffusers.models.modeling_utils import ModelMixin
except ImportError as error:
    raise ImportError(
        "diffusers pipelines need diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class DiffusersBundle(Bundle):
    """Base of the bundles of diffusers families.

    A family sets the class attributes and loads its components in its constructor: `require` all of them, `load` each,
    and set `text`. Raises CheckpointError where the folder is missing or incomplete, ConfigError for another pipeline
    class, both before weights are read.
    """

    recipe_rules: ClassVar[str] = "unirl.models.diffusers_pipeline.rules"
    family: ClassVar[str]
    """Name for messages and cache keys."""
    pipeline_class: ClassVar[str]
    """Class that `model_index.json` must name."""
    block_class_names: ClassVar[tuple[str, ...]]
    """The transformer blocks, sharded, checkpointed and compiled one by one."""
    lora_target_modules: ClassVar[tuple[str, ...]]
    """Suffixes of the linear layers that LoRA adapts."""
    text: TextEncoders
    """Text encoders and tokenizers."""

    def __init__(self, pretrained_model: str, device: str | torch.device) -> None:
        self.pretrained_model = pretrained_model
        self.folder = open_pipeline_folder(pretrained_model, self.pipeline_class)
        self.device = torch.device(device)
        self.scheduler_config = self.folder.config("scheduler", "scheduler_config.json")
        self._trained: dict[str, nn.Module] = {}
        # Kept, because wrapping for training changes the class of a module.
        self._classes: dict[str, type[Any]] = {}  # Any: as in `load`

    # Loading ---------------------------------------------------------------------------------------------------------

    def require(self, models: Mapping[str, type[nn.Module]], tokenizers: Sequence[str]) -> None:
        """Checks that the folder holds the components, models of these classes and with weights. Reads no weights.

        Raises CheckpointError or ConfigError naming the component, what is wrong and what to do.
        """
        for component, model_class in models.items():
            self.folder.require(component, (model_class.__name__,))
        for component in tokenizers:
            if self.folder.class_of(component) is None or not (self.folder.path / component).is_dir():
                raise CheckpointError(
                    f"{self.folder.path} has no {component}/. Use a complete {self.pipeline_class} folder."
                )

    def load(
        self, component: str, model_class: type[Any], dtype: torch.dtype, *, trains: bool = False
    ) -> Any:  # Any: a model of diffusers or of transformers, which share `from_pretrained` but no base class
        """A component in evaluation mode on the device, frozen unless it trains.

        Raises CheckpointError where it does not load, or where a weight of the model is not in the file.
        """
        path = self.folder.path / component
        keyword = "torch_dtype" if issubclass(model_class, ModelMixin) else "dtype"
        try:
            model, info = model_class.from_pretrained(path, output_loading_info=True, **{keyword: dtype})
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} does not load as {model_class.__name__}: {error}") from error
        wrong = {kind: sorted(map(str, info.get(kind, ()))) for kind in ("missing_keys", "mismatched_keys")}
        if any(wrong.values()):
            # Both libraries would go on with random weights in these places.
            raise CheckpointError(
                f"{path} does not hold all weights of {model_class.__name__}: {wrong}. Fetch it again."
            )
        model = model.to(self.device).eval()
        if trains:
            self._trained[component], self._classes[component] = model, model_class
            return model
        return model.requires_grad_(False)

    def load_tokenizer(self, component: str) -> transformers.PreTrainedTokenizerBase:
        """A tokenizer by the class that the index names. Raises CheckpointError where it does not load."""
        class_name = str(self.folder.class_of(component))
        path = self.folder.path / component
        tokenizer_class = vars(transformers).get(class_name) or getattr(transformers, class_name, None)
        if tokenizer_class is None:
            raise CheckpointError(f"{path}: transformers {transformers.__version__} has no class {class_name}.")
        try:
            return tokenizer_class.from_pretrained(path)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} does not load as {class_name}: {error}") from error

    # What adapters and training ask ----------------------------------------------------------------------------------

    def drop_text_encoders(self) -> None:
        """Frees the text encoders (most of a checkpoint's memory). Prompts in an embedding cache still encode."""
        self.text.drop()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The components that were loaded to train."""
        return dict(self._trained)

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Writes `pytorch_lora_weights.safetensors` for `load_lora_weights(folder)` of the pipeline class.

        lora_state: component -> state of peft's get_peft_model_state_dict, of every component that trains. Raises
        ContractError for other components or a key that is no LoRA weight.
        """
        self._check_components(lora_state)
        write_lora(folder, lora_state, rank=rank, alpha=alpha, target_modules=target_modules)

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole pipeline folder with the given weights; all else is the checkpoint's, copied.

        state: component -> name -> tensor, of every component that trains, LoRA already merged; buffers may be absent.
        Tensors keep their dtype. Raises CheckpointError where a parameter is missing or does not belong.
        """
        self._check_components(state)
        buffers = {name: dict(module.named_buffers()) for name, module in self._trained.items()}
        write_merged(folder, self.folder, state, self._classes, buffers)

    def _check_components(self, state: Mapping[str, object]) -> None:
        if set(state) != set(self._trained):
            raise ContractError(f"{self.family} trains {sorted(self._trained)}; got the components {sorted(state)}")
