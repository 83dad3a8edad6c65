"""Bundles of unified models: modules of our own for the published files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.models.causal_lm.converted import Stacked
from unirl.models.causal_lm.tokenizer import load_tokenizer
from unirl.models.loading import open_model_folder
from unirl.models.merged_export import check_fits, copy_others, export_folder
from unirl.models.one_component import OneComponentBundle
from unirl.models.packed.autoencoder import PackedAutoEncoder
from unirl.models.packed.language import TextCache
from unirl.models.packed.weights import replace_weights
from unirl.models.stored import FileTensor, Source, TensorFiles, without_values
from unirl.models.token_scores import ScoringHead
from unirl.types.devices import has_values
from unirl.types.weights import PublishedParts, in_published_parts


class PackedBundle(OneComponentBundle):
    """A decoder that trains, with its tokenizer, and the frozen ways of images into it and out of it.

    A model opens its folder by `__init__`, loads its modules and calls `finish`.
    """

    recipe_rules: ClassVar[str] = "unirl.models.diffusers_pipeline.rules"
    latent_divisor: ClassVar[int] = 16
    """Pixels that height and width divide into."""
    frame_divisor: ClassVar[int] = 0
    frame_rest: ClassVar[int] = 1
    reads_media: ClassVar[bool] = True
    block_class_names: ClassVar[tuple[str, ...]]
    lora_target_modules: tuple[str, ...]
    most_names: ClassVar[int | None] = None
    """Names of a kind in an error about weights; None for all."""
    is_packable: ClassVar[bool] = True
    """Replay never pads."""
    token_exchange: ClassVar[None] = None
    cuts_rows_inside: ClassVar[bool] = False
    layer_exchange: ClassVar[None] = None
    """No two ranks share a row."""
    vae: PackedAutoEncoder
    """The autoencoder of images."""
    model: Any  # Any: called as `unirl.models.ar` calls causal language models
    """The language model alone."""

    def __init__(self, pretrained_model: str, device: str | torch.device, *, defers_weights: bool) -> None:
        self.pretrained_model = pretrained_model
        self.device = torch.device(device)
        self.defers_weights = defers_weights
        """True if the parameters of the decoder are on the meta device, for a backend to read."""
        self.folder = open_model_folder(pretrained_model, None)
        self.files: dict[str, Path] = {}
        """The file of each weight of the decoder, and of what lies in the same files."""

    def stored_weights(self) -> dict[str, dict[str, Source]]:
        """Where each weight of the decoder is, see unirl.types.protocols.models.DefersWeights."""
        if not has_values(self.device):
            return {self.component: {**without_values(self.decoder)}}
        files = TensorFiles(self.files)
        stacks, found = self.stacks(), dict[str, Source]()
        for name, tensor in self.decoder.state_dict().items():
            parts = [FileTensor(files, f"{self.published_prefix}{each}", tensor.dtype) for each in stacks.get(name, ())]
            whole = FileTensor(files, f"{self.published_prefix}{name}", tensor.dtype)
            found[name] = Stacked(parts) if parts else whole
        return {self.component: found}

    def stacks(self) -> dict[str, PublishedParts]:
        """Where weights lie in those of the decoder that are stacks of several, each a whole entry, in their order."""
        return {}

    def published_parts(self) -> dict[str, PublishedParts]:
        return {f"{self.component}.{name}": parts for name, parts in self.stacks().items()}

    def published(self, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """As the base has it, stacks taken apart."""
        stacks = self.stacks()
        return super().published({name: in_published_parts(tensors, stacks) for name, tensors in state.items()})

    def load_tokenizer(self) -> Any:  # Any: a tokenizer of transformers
        """The folder's tokenizer."""
        return load_tokenizer(self.folder.path, model_type="qwen2")

    def finish(self, projection: nn.Linear, chunk_logits: int) -> None:
        """Lets the decoder score tokens after its output projection, and train what `does_train` says."""
        self.head = ScoringHead(projection, chunk_logits=chunk_logits)
        self.decoder.lm_head = self.head
        for name, parameter in self.decoder.named_parameters():
            parameter.requires_grad_(self.does_train(name))

    @property
    @abstractmethod
    def decoder(self) -> nn.Module:
        """What reads words and images."""

    @abstractmethod
    def new_decoder(self) -> nn.Module:
        """A decoder of this size without weights that are read."""

    @abstractmethod
    def does_train(self, name: str) -> bool:
        """True for a parameter of the decoder that training changes, LoRA aside."""

    @property
    def trained_module(self) -> nn.Module:
        return self.decoder

    @property
    def vocabulary_size(self) -> int:
        return self.head.out_features

    def new_cache(self) -> TextCache:
        return TextCache()

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole folder in the published layout with the given weights; all else is the checkpoint's, copied.

        state: {component: name -> tensor}, LoRA already merged. Tensors keep their dtype. Raises ConfigError if
        `folder` is the checkpoint itself, CheckpointError if names or shapes do not fit.
        """
        weights = self.published(state)
        target = export_folder(folder, self.folder.path)
        with torch.device("meta"):
            # Not ours, whose names adapters may have changed.
            expected = self.published({self.component: self.new_decoder().state_dict()})
        check_fits(weights, expected, self.folder.path, most=self.most_names)
        copy_others(self.folder.path, target, *{file.name for file in self.files.values()})
        replace_weights(self.files, weights, target)
