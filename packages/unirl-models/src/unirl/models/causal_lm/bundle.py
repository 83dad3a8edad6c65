"""A transformers language model as a bundle: loaded from a folder or hub id, checked, and exported again.

Model families derive from `CausalLMBundle` and name their classes; the base alone loads any causal language model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from unirl.models.causal_lm.attention import NAME as PACKED_ATTENTION
from unirl.models.causal_lm.attention import PACKABLE_LAYERS, Unpackable
from unirl.models.causal_lm.checks import check_blocks, check_tokenizer, plain_projection, rotations_by_length
from unirl.models.causal_lm.construction import from_configuration, without_weights
from unirl.models.causal_lm.converted import ConvertedState, NotInPartsError, converted_state
from unirl.models.causal_lm.export import write_merged
from unirl.models.causal_lm.reading import read_model
from unirl.models.causal_lm.recurrent import RECURRENT_LAYERS, run_by_sample
from unirl.models.causal_lm.tokenizer import load_tokenizer
from unirl.models.construction import TrueOnMeta
from unirl.models.cut_layers import cut_blocks
from unirl.models.extras import from_extra
from unirl.models.loading import ModelFolder, open_model_folder
from unirl.models.one_component import OneComponentBundle
from unirl.models.packing import Packing
from unirl.models.rules import heads_problem, layers_kept, layers_problem, tokens_kept
from unirl.models.spread_experts import published_experts, spread_stacked
from unirl.models.stored import Source, TensorFiles, safetensors_files, without_values
from unirl.models.token_scores import CHUNK_LOGITS, ScoringHead
from unirl.types.bounds import PositiveInt, Seed, bounded
from unirl.types.devices import has_values
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import CutBlock, ExpertExchange, LayerExchange, RecomputeContexts, TokenExchange
from unirl.types.recipe import heads_option
from unirl.types.weights import PublishedParts

with from_extra("transformers"):
    import transformers

logger = logging.getLogger(__name__)

_WEIGHTS = "model"
"""Beginning of the names of weight files."""


@bounded("bundle")
class CausalLMBundle(OneComponentBundle):
    """A causal language model with its tokenizer.

    pretrained_model: a folder that save_pretrained wrote, or a hub id. dtype: of the weights ("fp32", "bf16", "fp16"),
        whatever the file holds.
    chunk_logits: logits that scoring holds at once, see `unirl.models.token_scores`; the memory knob of replay.
    random_weights: seed of random weights, drawn as the folder's configuration says, for models that are trained from
        nothing; every rank draws the same. None takes the folder's.
    defers_weights: leave the weights to the backend, which reads this rank's part of each; folders without safetensors
        files are read at once, and random weights drawn.
    Raises CheckpointError or ConfigError before weights are read if the folder is missing, incomplete or of another
    model; CheckpointError for weights that do not fit and for a tokenizer of more words than the model.
    """

    component: ClassVar[str] = "model"
    family: ClassVar[str] = "a language model"
    task_type: ClassVar[str | None] = "CAUSAL_LM"
    index_file: ClassVar[str] = "config.json"
    spreads_tokens: ClassVar[bool] = True
    cuts_rows_inside: ClassVar[bool] = False
    """True if the model takes whole rows and cuts them itself where ranks share their positions."""
    cuts_layers: ClassVar[bool] = True
    model_types: ClassVar[tuple[str, ...]] = ()
    """`model_type` of the configurations that the bundle loads; empty loads any."""
    auto_class: ClassVar[Any] = transformers.AutoModelForCausalLM  # Any: transformers types its auto classes loosely
    expert_class_names: ClassVar[tuple[str, ...]] = ()
    """Classes of the modules that hold the experts of a layer as stacks, as transformers writes them."""
    recurrent_class_names: ClassVar[tuple[str, ...]] = ()
    """Classes of the layers that carry a state along a sample, which are called sample by sample in a packed row."""
    lora_target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Suffixes of the attention projections, which nearly every family names so."""

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        chunk_logits: PositiveInt = CHUNK_LOGITS,
        random_weights: Seed | None = None,
        defers_weights: bool = False,
    ) -> None:
        weights_dtype = dtype_named(dtype, "dtype")
        self.pretrained_model = pretrained_model
        self.device = torch.device(device)
        self.folder: ModelFolder = open_model_folder(
            pretrained_model, self.model_types, needs_weights=has_values(self.device)
        )
        self.tokenizer = load_tokenizer(self.folder.path)
        self.defers_weights = False
        """True if the parameters are on the meta device, for a backend to read."""
        self._stored: ConvertedState | None = None
        self._random_weights = random_weights
        if defers_weights:
            self._defer_weights(weights_dtype)
        if not self.defers_weights:
            self.model = self._load_model(weights_dtype).to(self.device).eval()
        self.head = ScoringHead(plain_projection(self.model), chunk_logits=chunk_logits)
        self.model.set_output_embeddings(self.head)
        check_tokenizer(self.tokenizer, self.model, self._words_read(), self.folder.path)
        check_blocks(self.model, self.block_class_names)
        self._check_logits()
        self.is_packable = self._pack()
        """True if replay can do without padding: attention alone joins tokens, and it is what SDPA does, or layers with
        a state that are called sample by sample."""
        self.token_exchange: TokenExchange | None = None
        """Between the ranks that share the positions of a packed row; None where this one has all."""
        self.layer_exchange: LayerExchange | None = None
        """Between the ranks that each have a part of the layers; None where this one has whole layers."""

    # What the stage asks ---------------------------------------------------------------------------------------------

    @property
    def vocabulary_size(self) -> int:
        """Words that the model has logits for; may exceed the tokenizer's."""
        return self.head.out_features

    @property
    def context_length(self) -> int:
        return int(self.model.config.get_text_config().max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence: the generation configuration's, else the configuration's or the tokenizer's."""
        for found in (
            self.model.generation_config.eos_token_id,
            self.model.config.get_text_config().eos_token_id,
            self.tokenizer.eos_token_id,
        ):
            if found is not None:
                return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
        return ()

    def new_cache(self) -> transformers.DynamicCache:
        return transformers.DynamicCache(config=self.model.config)

    # What training asks ----------------------------------------------------------------------------------------------

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers, as transformers declares them."""
        return tuple(sorted(self.model._no_split_modules or ()))

    @property
    def trained_module(self) -> nn.Module:
        return self.model

    def spread_tokens(self, exchange: TokenExchange) -> RecomputeContexts:
        """From now on a replay computes this rank's part of its packed row, see `unirl.models.spread_scores`; texts are
        sampled by every rank. Raises ConfigError if the model or its heads do not allow it.
        """
        at, name = f"topology.sp = {exchange.size}", self.folder.path.name
        config = self.model.config.get_text_config()
        if self.kept_whole or not self.is_packable:
            raise ConfigError(tokens_kept(at, name, self.kept_whole or "its layers are not packed attention alone"))
        if types := rotations_by_length(config):
            reason = f"its rotations ({', '.join(types)}) depend on the longest position of a row"
            raise ConfigError(tokens_kept(at, name, reason))
        num_heads = config.num_attention_heads
        num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads  # only those with fewer say it
        has_ring, size = exchange.ring is not None, exchange.num_head_parts
        problem = heads_problem(heads_option(has_ring), size, num_heads, num_key_heads, name, has_ring=has_ring)
        if problem is not None:
            raise ConfigError(problem)
        self.token_exchange = exchange
        return noop_context_fn

    def cut_layers(self, exchange: LayerExchange) -> list[CutBlock]:
        """From now on a rank computes with its heads and its part of the MLP, see `unirl.models.cut_layers`; the head,
        which is whole, scores its part of the tokens.

        Raises ConfigError if the model has no plan for it, or the ranks do not divide it.
        """
        at, name = f"topology.tp = {exchange.size}", self.folder.path.name
        if not self.cuts_layers:
            raise ConfigError(layers_kept(at, type(self).__name__, self.kept_whole))
        config = self.model.config.get_text_config()
        plan = getattr(config, "base_model_tp_plan", None) or {}
        if not self.is_packable or not plan:
            reason = "transformers has no plan for it" if self.is_packable else "its layers are not packed attention"
            raise ConfigError(layers_kept(at, name, reason))
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        problem = layers_problem("topology.tp", exchange.size, heads, key_heads, config.intermediate_size, name)
        if problem is not None:
            raise ConfigError(problem)
        blocks = [each for each in self.model.modules() if type(each).__name__ in self.block_class_names]
        self.layer_exchange = exchange
        return cut_blocks(self.model, blocks, plan, name, exchange)

    def spread_experts(self, exchange: ExpertExchange) -> list[nn.Module]:
        """From now on each token goes to the ranks of its experts. Returns the modules that hold the stacks.

        Raises ConfigError without experts, or if the ranks do not divide them.
        """
        found = list(self._stacks().values())
        num_experts = self.model.config.get_text_config().num_experts if found else 0
        spread_stacked(found, num_experts, self.folder.path.name, exchange)
        return found

    def published_parts(self) -> dict[str, PublishedParts]:
        """The weights of single experts, which checkpoints and engines know by these names."""
        return published_experts({f"{self.component}.{path}": module for path, module in self._stacks().items()})

    def _stacks(self) -> dict[str, nn.Module]:
        """Modules that hold the experts of a layer, by their names."""
        return {
            path: each for path, each in self.model.named_modules() if type(each).__name__ in self.expert_class_names
        }

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a whole model folder with the given weights: save_pretrained, and the checkpoint's other files copied.

        state: {"model": name -> tensor}, LoRA already merged; tied weights may be named once. Tensors keep their dtype.
        Raises ConfigError if `folder` is the checkpoint itself, CheckpointError if names or shapes do not fit.
        """
        weights = {name: tensor.detach().to("cpu") for name, tensor in self.published(state).items()}
        write_merged(folder, self.folder.path, self.model, weights)

    # Loading ---------------------------------------------------------------------------------------------------------

    def _defer_weights(self, dtype: torch.dtype) -> None:
        """Build the model without its weights if they can be read in parts; if not, the log says why."""
        path = self.folder.path
        if not has_values(self.device):
            self.model, self.defers_weights = without_weights(self.auto_class, path, dtype, self.device), True
            return
        if self._random_weights is not None:
            return
        files = safetensors_files(path, _WEIGHTS)
        if files is None or "quantization_config" in self.folder.config:
            reason = f"it has no {_WEIGHTS}.safetensors" if files is None else "its weights are quantised"
            logger.warning("every rank reads all of %s: %s", path, reason)
            return
        self.defers_weights = True
        try:
            self.model = without_weights(self.auto_class, path, dtype, self.device)
            self._stored = converted_state(self.model, TensorFiles(files))
            with torch.no_grad(), TrueOnMeta():
                probe, device = self._probe()
                probe(input_ids=self._two_tokens(device), use_cache=False)
        except (NotInPartsError, ContractError, RuntimeError) as error:
            # Also a model whose constructor or forward needs values, so that it cannot be asked before it has them.
            logger.warning("every rank reads all of %s: %s", path, error)
            self.defers_weights = False

    def stored_weights(self) -> dict[str, dict[str, Source]]:
        """Where each weight is, see unirl.types.protocols.models.DefersWeights. Once, so that no file stays open."""
        if not has_values(self.device):
            return {self.component: {**without_values(self.model)}}
        stored, self._stored = self._stored, None
        if stored is None:
            raise ContractError(f"the weights of {self.folder.path} have been read")
        return {self.component: stored.checked(self.model, self.folder.path)}

    def _load_model(self, dtype: torch.dtype) -> Any:  # Any: PreTrainedModel without the attributes of its families
        path = self.folder.path
        if not has_values(self.device):
            return from_configuration(self.auto_class, path, dtype, self.device)
        if self._random_weights is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._random_weights)
                return from_configuration(self.auto_class, path, dtype, torch.device("cpu"))
        return read_model(self.auto_class, path, dtype, self.device)

    def _words_read(self) -> int:
        """Words that texts may have."""
        return self.vocabulary_size

    def _check_logits(self) -> None:
        """Raises ConfigError for a model that does more to its logits than project, which scoring would leave out."""
        ramp = torch.linspace(-100, 100, self.vocabulary_size, dtype=self.head.weight.dtype, device=self.device)
        handle = self.head.register_forward_hook(lambda _, __, output: ramp.expand_as(output))
        try:
            with torch.no_grad(), TrueOnMeta():
                model, device = self._probe()
                logits = model(input_ids=self._two_tokens(device), use_cache=False).logits
        finally:
            handle.remove()
        if has_values(self.device) and not torch.equal(logits, ramp.expand_as(logits)):
            raise ConfigError(
                f"{type(self.model).__name__} scales or caps its logits after the projection; its tokens cannot be "
                "scored. Switch that off in the configuration where it is allowed (final_logit_softcapping: null)."
            )

    def _pack(self) -> bool:
        """Switch the decoder to packed attention where it can do without what that leaves out; whether it did."""
        config = self.model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ["full_attention"])  # only mixed models list them
        # transformers declares the backend of models whose layers are all attention.
        has_recurrent = bool(self.recurrent_class_names)
        packable = PACKABLE_LAYERS | RECURRENT_LAYERS if has_recurrent else PACKABLE_LAYERS
        if not (self.model._supports_attention_backend or has_recurrent) or not layers <= packable:
            return False
        for each in self.model.modules():
            if type(each).__name__ in self.recurrent_class_names:
                run_by_sample(each)
        before = config._attn_implementation
        self._set_attention(PACKED_ATTENTION)
        model, device = self._probe()
        ids = self._two_tokens(device)
        packing = Packing.of([1, 1], ids.device)
        try:
            with torch.no_grad(), TrueOnMeta():
                model(input_ids=ids, position_ids=self._probe_positions(ids), packing=packing, use_cache=False)
        except Unpackable:
            self._set_attention(before)
            return False
        return True

    def _set_attention(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def _probe(self) -> tuple[Any, torch.device]:  # Any: as in `_load_model`
        """A model of which a forward tells what it computes, not with which weights, and the device of its inputs."""
        if not self.defers_weights:
            return self.model, self.device
        # In bfloat16, which every kernel takes.
        return copy.deepcopy(self.model).to("meta", torch.bfloat16), torch.device("meta")

    def _two_tokens(self, device: torch.device) -> Tensor:
        return torch.zeros(1, 2, dtype=torch.long, device=device)

    def _probe_positions(self, ids: Tensor) -> Tensor:
        return torch.zeros_like(ids)
