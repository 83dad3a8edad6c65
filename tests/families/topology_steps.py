"""A rollout, its replay and one update of a tiny family, as one process and the ranks of a topology do them."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from family_steps import ADVANTAGES, SAMPLES_PER_PROMPT, kit, request_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.causal_lm.pipeline import ChatPipeline
from unirl.models.causal_lm.routing import RoutedTokens
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pipeline import HunyuanImage3Pipeline, HunyuanImage3TextPipeline
from unirl.models.qwen3.bundle import Qwen3Bundle, Qwen3MoeBundle
from unirl.models.qwen3.pipeline import Qwen3MoePipeline, Qwen3Pipeline
from unirl.models.qwen3_5.bundle import Qwen35MoeBundle
from unirl.models.qwen3_5.pipeline import Qwen35MoePipeline
from unirl.models.qwen3_omni.bundle import Qwen3OmniThinkerBundle
from unirl.models.qwen3_omni.pipeline import Qwen3OmniThinkerPipeline
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.models.spread_experts import spread_stacked
from unirl.models.token_plan import SpreadTokens
from unirl.rollout.engine.replica.text import ReplicaTextEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.sde.kernels import FlowSDEStrategy
from unirl.train.backend.expert_exchange import RowExchange
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.layer_exchange import SumExchange
from unirl.train.backend.ring import RingExchange
from unirl.train.backend.ulysses import UlyssesExchange
from unirl.train.backend.wrap import cut_experts, cut_linears
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, OptimizerConfig, TrainTopology
from unirl.train.stack import TrainStack
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import ImageLists, Texts
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment, TextSegment
from unirl.types.training import StepStats
from unirl.types.weights import weight_buckets, weight_spec

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1.0)
"""A step is nearly the gradient times the rate. At a small epsilon Adam's first step is its sign, which rounding turns
where a gradient is zero but for rounding (biases of keys)."""


tested_backend: Any = importlib.import_module("tested_backend")  # of the tests of unirl-train


class NotingBackend(tested_backend.backend_class()):
    """Notes the gradients and the tokens of each step that it takes."""

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Every rank gathers the whole gradients."""
        self.gradients = {name: _whole(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        return super().optimizer_step(max_grad_norm)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


tiny_text: Any = importlib.import_module("packages.unirl-models.tests.tiny_text")
tiny_hunyuan_image3: Any = importlib.import_module("packages.unirl-models.tests.tiny_hunyuan_image3")

NUM_EXPERTS = 8
DIVIDED = re.compile(r"\.(experts|[qkvo]_proj|gate_proj|up_proj|down_proj)\.(?!lora)")
"""What ranks have together in some topology."""


def _with_experts(config: Any) -> Any:
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, num_experts=NUM_EXPERTS))


@dataclasses.dataclass(frozen=True)
class TextFamily:
    """A language model, of which ranks share the experts or the positions of texts."""

    write: Callable[[Path], Any]
    bundle: Callable[..., Any]
    pipeline: Callable[..., Any]
    axes: tuple[str, ...] = ("ep",)


TEXTS = {
    "qwen3_moe": TextFamily(
        lambda folder: tiny_text.save_text_model(tiny_text.qwen3_moe(num_experts=NUM_EXPERTS), folder),
        Qwen3MoeBundle,
        partial(Qwen3MoePipeline, replays_experts=True),
        ("ep", "sp"),
    ),
    "qwen3_5_moe": TextFamily(
        lambda folder: tiny_text.save_text_model(
            tiny_text.qwen3_5_moe(
                num_experts=NUM_EXPERTS, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
            ),
            folder,
        ),
        Qwen35MoeBundle,
        partial(Qwen35MoePipeline, replays_experts=True),
    ),
    "qwen3_omni": TextFamily(
        lambda folder: tiny_text.save_omni_model(tiny_text.qwen3_omni(num_experts=NUM_EXPERTS), folder),
        Qwen3OmniThinkerBundle,
        Qwen3OmniThinkerPipeline,
        ("ep", "sp"),
    ),
    "qwen2_5_vl": TextFamily(
        lambda folder: tiny_text.save_vision_model(tiny_text.qwen_vl("qwen2_5_vl"), folder),
        partial(QwenVLBundle, freeze_vision=False),
        QwenVLPipeline,
        ("sp",),
    ),
    "qwen3_vl": TextFamily(
        lambda folder: tiny_text.save_vision_model(tiny_text.qwen_vl("qwen3_vl"), folder),
        partial(QwenVLBundle, freeze_vision=False),
        QwenVLPipeline,
        ("sp",),
    ),
    "hunyuan_image3": TextFamily(
        lambda folder: tiny_hunyuan_image3.save_hunyuan_image3(folder, config=_with_experts(tiny_hunyuan_image3.TINY)),
        partial(HunyuanImage3Bundle, trains="all"),
        HunyuanImage3TextPipeline,
    ),
    "qwen3": TextFamily(
        lambda folder: tiny_text.save_text_model(tiny_text.qwen3(), folder), Qwen3Bundle, Qwen3Pipeline, ("sp", "tp")
    ),
    "qwen2": TextFamily(
        lambda folder: tiny_text.save_text_model(tiny_text.qwen2(), folder), CausalLMBundle, ChatPipeline, ("sp",)
    ),
    "qwen3_tied": TextFamily(
        lambda folder: tiny_text.save_text_model(tiny_text.qwen3(tie_word_embeddings=True), folder),
        Qwen3Bundle,
        Qwen3Pipeline,
        ("tp",),
    ),
    "qwen2_two_keys": TextFamily(
        lambda folder: tiny_text.save_text_model(tiny_text.qwen2(num_key_value_heads=2), folder),
        CausalLMBundle,
        ChatPipeline,
        ("tp",),
    ),
}
EXPERT_TEXTS, SHARED_TEXTS, CUT_TEXTS = (
    [n for n, family in TEXTS.items() if axis in family.axes] for axis in ("ep", "sp", "tp")
)


def folder_of(name: str, folder: Path) -> Path:
    """The model of a family of texts; other tests have other sizes of the same families in `folder`."""
    return folder / "of_experts" / name


def pipeline_of(name: str, folder: Path) -> Any:
    """A family's pipeline, whose folder is written where it is not there yet."""
    if name not in TEXTS:
        return kit.ours(name, folder / name)
    family, place = TEXTS[name], folder_of(name, folder)
    if not place.exists():
        family.write(place)
    return family.pipeline(family.bundle(str(place), defers_weights=True))


def backend_of(
    name: str, folder: Path, topology: TrainTopology, lora: LoraConfig | None = None, **fsdp: Any
) -> tuple[Any, NotingBackend]:
    """A family's pipeline and the backend that trains it."""
    pipeline = pipeline_of(name, folder)
    torch.manual_seed(0)  # of the adapters
    backend = NotingBackend(
        pipeline.bundle,
        optimizer=OPTIMIZER,
        device="cpu",
        topology=topology,
        fsdp=FSDPConfig(**fsdp),
        lora=lora,
        ema=EMAConfig(decay=0.5, warmup=False),
    )
    return pipeline, backend


def step_of(name: str, folder: Path, topology: TrainTopology, checkpoints: Path, **options: Any) -> dict[str, Any]:
    """What this rank finds of a GRPO step: two prompts with two samples each, over the shards of the batch.

    options: see `backend_of`.
    """
    pipeline, backend = backend_of(name, folder, topology, **options)
    gathered: dict[str, int] = {}
    for path, module in pipeline.bundle.trained_module.named_modules() if name in TEXTS else ():
        if DIVIDED.search(f"{path}.") and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(partial(_note_weights, gathered, path))
    # All ranks sample all, with the model that is spread over them.
    key = "text" if name in TEXTS else "image"
    track = texts_of(pipeline, backend) if name in TEXTS else images_of(name, pipeline, backend)
    segment = track.segment
    if isinstance(segment, LatentSegment):
        samples, logp = segment.clean_latents, segment.sde_logp
        algorithm = DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="rollout")
    else:
        assert isinstance(segment, TextSegment)
        samples, logp = segment.tokens, segment.log_probs
        algorithm = ARGRPO(pipeline, backend, old_logp_source="rollout")
    assert logp is not None
    share = len(ADVANTAGES) // backend.dp_size
    own = track.slice(backend.dp_rank * share, (backend.dp_rank + 1) * share)
    # Of layers that ranks have together gradients of several micro-batches add up before they are reduced.
    micro = share // 2 if topology.tp > 1 else share
    stack = TrainStack(backend, {key: algorithm}, micro_batch_size=micro, max_grad_norm=1.0)
    stack.prepare()
    result = stack.train(RolloutResp(tracks={key: own}), progress=0.0)
    weights = {key: value.clone() for key, value in backend.weight_source.weights()}
    Checkpointer(backend, str(checkpoints)).save(1, {})
    return {
        "samples": samples,
        "logp": logp,
        "metrics": {key: value for key, value in result.metrics.items() if not key.startswith(("timing_s/", "perf/"))},
        "gradients": backend.gradients,
        "state": {key: _whole(value) for key, value in backend.state_dict().items()},
        "weights": weights,
        "shards": _pushed_shards(backend),
        "copied": name not in TEXTS or _reach_a_copy(name, folder, weights, backend),
        "bytes": _bytes_exchanged(backend),
        "kept": {key: _numel(tensor) for key, tensor in backend.parameters.items() if DIVIDED.search(key)},
        "gathered": gathered,
    }


def _bytes_exchanged(backend: FSDPBackend) -> int:
    if backend.layer_exchange is not None:
        return backend.layer_exchange.bytes_reduced
    exchange = backend.token_exchange
    of_tokens = 0 if exchange is None else exchange.bytes_sent
    of_ring = exchange.ring.bytes_sent if exchange is not None and isinstance(exchange.ring, RingExchange) else 0
    return of_tokens + of_ring + (0 if backend.expert_exchange is None else backend.expert_exchange.bytes_sent)


def _reach_a_copy(name: str, folder: Path, weights: Mapping[str, Tensor], backend: FSDPBackend) -> bool:
    """True if pushed weights become those of an engine's own model."""
    family = TEXTS[name]
    bundle = family.bundle(str(folder_of(name, folder)))
    engine = ReplicaTextEngine(family.pipeline(bundle), bundle=bundle, dtype="fp32", forward_batch_size=4)
    engine.begin_weights(1, [weight_spec(key, value) for key, value in weights.items()])
    for bucket in weight_buckets(weights.items(), policy_version=1, max_bytes=1 << 16):
        engine.receive_weights(bucket)
    engine.finish_weights(1)
    (expected,) = backend.weight_source.merged_state("default").values()
    state = bundle.trained_module.state_dict()
    return all(torch.equal(value, state[key]) for key, value in expected.items())


def _pushed_shards(backend: FSDPBackend) -> list[tuple[str, int, Tensor]]:
    """What this rank has of a push of slices, as it announces it."""
    rows = backend.weight_source.shard_rows()
    found = []
    for shard in backend.weight_source.shards():
        shape, dtype, start, stop = rows[shard.name]
        assert (shard.shape, shard.rows.dtype, shard.start) == (shape, dtype, start), shard.name
        assert len(shard.rows) == stop - start
        found.append((shard.name, start, shard.rows.clone()))
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(each.is_shard() for each in tensor.placements)


def _numel(tensor: Tensor) -> int:
    """Elements on this rank."""
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def _note_weights(found: dict[str, int], path: str, module: nn.Module, args: Any) -> None:
    found[path] = sum(_numel(parameter) for parameter in module.parameters())


def images_of(name: str, pipeline: Any, backend: FSDPBackend) -> RolloutTrack:
    """Four samples of a diffusion model."""
    family = kit.families()[name]
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4, decode=False)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    return engine.generate(request_of(family, engine, params, 0)).root_track().replace(advantages=ADVANTAGES)


def texts_of(pipeline: Any, backend: FSDPBackend) -> RolloutTrack:
    """Four completions of a language model."""
    prompts = ["1+1=", "1+1=", "a longer prompt", "a longer prompt"]
    ids = [f"s{place}" for place in range(len(prompts))]
    request = RolloutReq(
        sample_ids=ids,
        group_ids=["a", "a", "b", "b"],
        primitives=_shown(pipeline, prompts),
        sampling_params=ARSamplingParams(temperature=0.9, max_new_tokens=6, seed=2),
    )
    engine = TrainsideTextEngine(pipeline, backend, forward_batch_size=4)
    return engine.generate(request).root_track().replace(advantages=ADVANTAGES)


def _shown(pipeline: Any, prompts: list[str]) -> dict[str, Any]:
    """Prompts, and for models that see an image with every other one."""
    generator = torch.Generator().manual_seed(5)
    shown = [[torch.rand(3, 56, 84, generator=generator)] if place % 2 == 0 else [] for place in range(len(prompts))]
    images = {"image": ImageLists(images=shown)} if pipeline.bundle.reads_media else {}
    return {"text": Texts(texts=prompts), **images}


def resumed(
    name: str,
    folder: Path,
    checkpoints: Path,
    topology: TrainTopology | None = None,
    save: Path | None = None,
    lora: LoraConfig | None = None,
) -> dict[str, Tensor]:
    """The state of this process, or these ranks, that have loaded what others saved. save: where they save it again."""
    _, backend = backend_of(name, folder, TrainTopology() if topology is None else topology, lora)
    Checkpointer(backend, str(checkpoints)).load()
    if save is not None:
        Checkpointer(backend, str(save)).save(1, {})
    return {key: _whole(value) for key, value in backend.state_dict().items()}


# In float64, the transformers alone ------------------------------------------------------------------------------


class NotingRing(RingExchange):
    """Notes the tokens of each attention, and the bytes that it should send."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.attentions: list[list[int]] = []
        self.expected_bytes = 0

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Keys and values of all other ranks but the next pass through this one, forwards and backwards, and gradients
        of those of all ranks."""
        lengths = options["lengths"]
        self.attentions.append(list(lengths))
        through = sum(lengths) - lengths[(self.rank + 1) % self.size]
        self.expected_bytes += (2 * through + sum(lengths)) * (_slice_bytes(key, 2) + _slice_bytes(value, 2))
        return super().attention(query, key, value, **options)


class NotingExchange(UlyssesExchange):
    """Notes the tokens of each attention, and the bytes that it should send."""

    def __init__(
        self, group: dist.ProcessGroup, heads: dist.ProcessGroup | None = None, ring: NotingRing | None = None
    ) -> None:
        super().__init__(group, heads, ring)
        self.attentions: list[list[int]] = [] if ring is None else ring.attentions
        """Tokens of each rank."""
        self.expected_bytes = 0

    def to_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """This rank sends queries, keys and values of its tokens for the heads that others keep, and back gradients of
        theirs for its heads."""
        if self.ring is None:
            self.attentions.append(list(lengths))
            self._expect(own, lengths, all_heads=_slice_bytes(own, -2))
        return super().to_heads(own, lengths)

    def to_tokens(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """It sends results of others' tokens, and back gradients of its tokens, for all heads."""
        if self.ring is None:
            self._expect(own, lengths, all_heads=_slice_bytes(own, -2) * self.size)
        return super().to_tokens(own, lengths)

    def _expect(self, own: Tensor, lengths: Sequence[int], all_heads: int) -> None:
        """One way and, where gradients flow, the other. all_heads: bytes of one token."""
        assert own.requires_grad
        others = sum(lengths) - lengths[self.rank]
        self.expected_bytes += all_heads * (lengths[self.rank] * (self.size - 1) + others) // self.size

    def gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """To each other rank its own part, padded to the longest; nothing backwards."""
        self.expected_bytes += _slice_bytes(part, dim) * max(lengths) * (self.size - 1)
        return super().gathered(part, dim, lengths)


def _slice_bytes(tensor: Tensor, dim: int) -> int:
    """Bytes of one place along a dimension, also where there is none."""
    return math.prod(tensor.movedim(dim, 0).shape[1:]) * tensor.element_size()


def calls_of(name: str, folder: Path, exchange: UlyssesExchange | None) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Transformers in float64 with the arguments of one call each, as the family's velocity makes it."""
    family, pipeline = kit.families()[name], kit.ours(name, folder / name)
    engine = TrainsideRolloutEngine(pipeline, forward_batch_size=4, decode=False)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    calls: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert not args
        calls[module] = kwargs

    modules = pipeline.bundle.trainable_modules().values()
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    engine.generate(request_of(family, engine, params, 0))
    for hook in hooks:
        hook.remove()
    plan = pipeline.bundle.token_plan
    assert plan is not None
    if exchange is not None:
        SpreadTokens(pipeline.bundle.trainable_modules(), plan, exchange)
    return [(module.double(), _doubled(kwargs)) for module, kwargs in calls.items()]


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _doubled(each) for key, each in value.items()}
    return [_doubled(each) for each in value] if isinstance(value, list) else value


class Doubles(TorchFunctionMode):
    """Inside, what a model computes in float32 for precision (norms, rotations) is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return func(*args, **kwargs or {})


def doubles_of(name: str, folder: Path, exchange: UlyssesExchange | None = None) -> dict[str, Tensor]:
    """Outputs of the transformers and gradients of a loss of them, the mean over ranks."""
    found: dict[str, Tensor] = {}
    for number, (module, kwargs) in enumerate(calls_of(name, folder, exchange)):
        with Doubles():
            output = module(**kwargs | {"return_dict": False})[0]
        weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        (output * weights).sum().backward()
        found[f"{number}.output"] = output.detach()
        for key, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if exchange is not None:
                dist.all_reduce(gradient)
                gradient = gradient / exchange.size
            found[f"{number}.{key}"] = gradient
    return found


class NotingRows(RowExchange):
    """Notes how many rows it sends to each rank, and the bytes that it should send."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.sent: list[list[int]] = []
        """Rows for the experts of each rank, by layer."""
        self.expected_bytes = 0

    def to_experts(self, rows: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> Tensor:
        """A layer sends rows to others and back what it made of theirs, and as much of gradients."""
        self.sent.append(list(to_each))
        crossing = sum(to_each) - to_each[self.rank] + sum(of_each) - of_each[self.rank]
        counts = 8 * NUM_EXPERTS * (self.size - 1) // self.size
        self.expected_bytes += 2 * crossing * rows.shape[1] * rows.element_size() + counts
        return super().to_experts(rows, to_each, of_each)


class NotingSums(SumExchange):
    """Notes the bytes that a rank should give to sums."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.expected_bytes = 0

    def expect(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Attention and MLP of each layer, forwards and backwards, gradients of norms of heads where there are, and of
        what the head reads."""
        config = model.config
        norms = 2 * model.model.layers[0].self_attn.head_dim if config.model_type == "qwen3" else 0
        states = kwargs["input_ids"].numel() * config.hidden_size
        self.expected_bytes += 8 * (config.num_hidden_layers * (2 * 2 * states + norms) + states)


def _in_doubles(bundle: Any) -> nn.Module:
    """What trains of a bundle that defers its weights, with them."""
    files = bundle.stored_weights()[bundle.component]
    model = bundle.trained_module
    if isinstance(bundle, RoutedTokens):
        bundle.model.set_experts_implementation("eager")  # the other kernels take no doubles
    read: dict[int, nn.Parameter] = {}
    for key, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in read:  # else it is tied
            value = files[key].read(tuple(slice(0, size) for size in parameter.shape)).double()
            read[id(parameter)] = nn.Parameter(value.clone())
        owner, _, last = key.rpartition(".")
        setattr(model.get_submodule(owner), last, read[id(parameter)])
    return model.double()


UNSEEN = ("model.visual.", "visual.", "audio_tower.")
"""Encoders of media, which a row without media does not reach."""
TEXT_LENGTHS = {"many": (3, 5, 1, 4), "one": (1,)}
"""Tokens of completions: of a row that ranks share, and of one with fewer positions than ranks."""


def shared_doubles_of(
    name: str, folder: Path, exchange: UlyssesExchange | SumExchange | None = None
) -> dict[str, Tensor]:
    """What replays find of texts, and gradients of a loss of it, the mean over ranks.

    exchange: of tokens, or of layers.
    """
    pipeline = pipeline_of(name, folder)
    model, found = _in_doubles(pipeline.bundle), dict[str, Tensor]()
    if isinstance(exchange, NotingSums):
        model.register_forward_pre_hook(exchange.expect, with_kwargs=True)
        cut_linears(pipeline.bundle.cut_layers(exchange), init_device_mesh("cpu", (exchange.size,)))
    elif exchange is not None:
        pipeline.bundle.spread_tokens(exchange)
    params = ARSamplingParams(temperature=0.9, max_new_tokens=6)
    places_of = pipeline.adapter.positions

    def positions(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():  # transformers counts places of images in float32
            return places_of(*args)

    pipeline.adapter.positions = positions
    for kind, lengths in TEXT_LENGTHS.items():
        generator = torch.Generator().manual_seed(3)
        tokens = [torch.randint(0, 250, (length,), generator=generator) for length in lengths]
        prompts = ["1+1=", "a longer prompt", "b", "1+1="][: len(lengths)]
        conditions = pipeline.encode(_shown(pipeline, prompts), params)
        if kind == "one":
            conditions = {"prompt": PromptCondition.pack(tokens=[torch.tensor([7])])}
        segment = TextSegment.pack(tokens=tokens, params=params)
        with Doubles():
            stats = pipeline.replay(conditions, segment, params)
        parts = {"logp": stats.logp_N, "entropy": stats.entropy_N, "hidden": stats.hidden_N}
        loss = sum(
            (part * torch.randn(part.shape, dtype=torch.float64, generator=generator)).sum() for part in parts.values()
        )
        model.zero_grad()
        with mock.patch.object(Tensor, "float", Tensor.double):  # logits are computed again, outside of the mode
            loss.backward()
        parts["collision"] = stats.collision_N
        found |= {f"{kind}.{key}": value.detach() for key, value in parts.items()}
        for key, parameter in model.named_parameters():
            if parameter.grad is None:
                assert key.startswith(UNSEEN), key
                continue
            gradient = _local(parameter.grad)
            if exchange is not None and not _is_cut(parameter.grad):
                dist.all_reduce(gradient)
                gradient /= exchange.size
            found[f"{kind}.{key}"] = _whole(parameter.grad)
    return found


def text_doubles_of(name: str, folder: Path, exchange: RowExchange | None = None) -> dict[str, Tensor]:
    """Logits of eight rows of tokens, of which each rank has its share, and gradients of the mean of their losses."""
    bundle = pipeline_of(name, folder).bundle
    model = _in_doubles(bundle)
    rank, size = (0, 1) if exchange is None else (exchange.rank, exchange.size)
    if exchange is not None:
        cut_experts(bundle.spread_experts(exchange), init_device_mesh("cpu", (size,)))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 250, (8, 7), generator=generator).chunk(size)[rank]
    weights = torch.randn((8, 7, bundle.vocabulary_size), dtype=torch.float64, generator=generator).chunk(size)[rank]
    with Doubles():
        logits = bundle.model(input_ids=ids, position_ids=torch.arange(7).expand_as(ids), use_cache=False).logits
    ((logits * weights).sum() * size).backward()
    found = {"logits": logits.detach() if exchange is None else _of_all_ranks(logits.detach(), size)}
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if isinstance(parameter.grad, DTensor):
            found[key] = parameter.grad.full_tensor()
            continue
        found[key] = parameter.grad
        if exchange is not None:
            dist.all_reduce(found[key])
            found[key] /= size
    return found


def one_sided(exchange: RowExchange | None = None) -> dict[str, Tensor]:
    """What experts make of tokens that all go to the first of them, and gradients, where other ranks have no row."""
    module = tiny_text.qwen3_moe(num_experts=NUM_EXPERTS).model.layers[0].mlp.experts
    if exchange is not None:
        spread_stacked([module], NUM_EXPERTS, "the model", exchange)
        cut_experts([module], init_device_mesh("cpu", (exchange.size,)))
    tokens = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.linspace(0.1, 1, 10).view(5, 2).requires_grad_(True)
    out = module(tokens, torch.tensor([[0, 1]]).expand(5, 2), weights)
    out.square().sum().backward()
    found = {"out": out.detach()}
    for name, leaf in {"tokens": tokens, "weights": weights, **dict(module.named_parameters())}.items():
        assert leaf.grad is not None, name
        found[name] = _whole(leaf.grad)
    return found


def _of_all_ranks(rows: Tensor, size: int) -> Tensor:
    found = [torch.empty_like(rows) for _ in range(size)]
    dist.all_gather(found, rows)
    return torch.cat(found)


# What a rank runs --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A topology of a number of ranks."""

    world_size: int
    topology: TrainTopology
    fsdp: tuple[tuple[str, Any], ...] = ()
    lora: LoraConfig | None = None


CASES = {
    "sp2": Case(2, TrainTopology(sp=2)),
    "sp2-recomputed": Case(2, TrainTopology(sp=2), (("activation_checkpointing", True),)),
    "dp2-sp2": Case(4, TrainTopology(dp_shard=2, sp=2)),
    "hsdp2-sp2": Case(4, TrainTopology(dp_replicate=2, sp=2)),
    "sp4": Case(4, TrainTopology(sp=4)),
    "ring2": Case(2, TrainTopology(sp=2, ring=2)),
    "ring2-recomputed": Case(2, TrainTopology(sp=2, ring=2), (("activation_checkpointing", True),)),
    "sp4-ring2": Case(4, TrainTopology(sp=4, ring=2)),
    "tp2": Case(2, TrainTopology(tp=2)),
    "tp2-recomputed": Case(2, TrainTopology(tp=2), (("activation_checkpointing", True),)),
    "dp2-tp2": Case(4, TrainTopology(dp_shard=2, tp=2)),
    "hsdp2-tp2": Case(4, TrainTopology(dp_replicate=2, tp=2)),
    "tp2-lora": Case(2, TrainTopology(tp=2), lora=LoraConfig(rank=2, alpha=4.0)),
    "dp2-tp2-lora": Case(
        4, TrainTopology(tp=2), lora=LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "o_proj", "down_proj"))
    ),
    "ep2": Case(2, TrainTopology(ep=2)),
    "ep2-recomputed": Case(2, TrainTopology(ep=2), (("activation_checkpointing", True),)),
    "dp2-ep2": Case(4, TrainTopology(ep=2)),
    "hsdp2-ep2": Case(4, TrainTopology(dp_replicate=2, ep=2)),
    "ep4": Case(4, TrainTopology(ep=4)),
    "sp2-ep2": Case(4, TrainTopology(sp=2, ep=2)),
    "ep2-lora": Case(2, TrainTopology(ep=2), lora=LoraConfig(rank=2, alpha=4.0)),
}


def refusals(name: str, folder: Path) -> dict[str, str]:
    """What ranks are told whose samples differ, and that do not divide the heads of a model."""
    found = {"differ": "", "heads": "", "plan": ""}
    family, (pipeline, backend) = kit.families()[name], backend_of(name, folder, TrainTopology(sp=2))
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4, decode=False)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    track = engine.generate(request_of(family, engine, params, 0)).root_track().replace(advantages=ADVANTAGES)
    segment = track.segment
    assert isinstance(segment, LatentSegment)
    if dist.get_rank() == 1:
        segment.latents[0, 0].add_(1e-3)
    algorithm = DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="rollout")
    stack = TrainStack(backend, {"image": algorithm}, micro_batch_size=4, max_grad_norm=1.0)
    try:
        stack.train(RolloutResp(tracks={"image": track}), progress=0.0)
    except ContractError as error:
        found["differ"] = str(error)
    three = UlyssesExchange(backend.collectives.group("sp"))
    three.num_head_parts = 3
    bundle = kit.ours(name, folder / name).bundle
    try:
        bundle.spread_tokens(three)
    except ConfigError as error:
        found["heads"] = str(error)
    bundle.token_plan = None
    try:
        bundle.spread_tokens(backend.token_exchange)
    except ConfigError as error:
        found["plan"] = str(error)
    return found


def text_refusal(name: str, folder: Path, topology: TrainTopology) -> str:
    """What ranks are told whose texts differ."""
    pipeline, backend = backend_of(name, folder, topology)
    track = texts_of(pipeline, backend)
    assert isinstance(track.segment, TextSegment)
    if dist.get_rank() == 1:
        track.segment.tokens[0] += 1
    algorithm = ARGRPO(pipeline, backend, old_logp_source="rollout")
    stack = TrainStack(backend, {"text": algorithm}, micro_batch_size=4, max_grad_norm=1.0)
    try:
        stack.train(RolloutResp(tracks={"text": track}), progress=0.0)
    except ContractError as error:
        return str(error)
    return ""


def expert_images(folder: Path, topology: TrainTopology) -> dict[str, Any]:
    """Images of HunyuanImage3, their log-probs, and gradients of a Flow-GRPO step with the experts of the rollout."""
    bundle = TEXTS["hunyuan_image3"].bundle(str(folder_of("hunyuan_image3", folder)))
    pipeline = HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), decode_batch_size=4, replays_experts=True)
    backend = NotingBackend(bundle, optimizer=OPTIMIZER, device="cpu", topology=topology)
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4)
    params = DiffusionSamplingParams(
        num_inference_steps=2,
        height=32,
        width=96,
        guidance_scale=2.5,
        negative_prompt="",
        eta=0.7,
        sde_indices=[0],
        autocast_precision="fp32",
        samples_per_prompt=SAMPLES_PER_PROMPT,
    )
    family = SimpleNamespace(inputs=lambda _: {})
    track = engine.generate(request_of(family, engine, params, 0)).root_track().replace(advantages=ADVANTAGES)
    segment = track.segment
    assert isinstance(segment, LatentSegment) and segment.sde_logp is not None
    share = len(ADVANTAGES) // backend.dp_size
    algorithm = DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="rollout")
    stack = TrainStack(backend, {"image": algorithm}, micro_batch_size=share, max_grad_norm=1.0)
    stack.prepare()
    own = track.slice(backend.dp_rank * share, (backend.dp_rank + 1) * share)
    stack.train(RolloutResp(tracks={"image": own}), progress=0.0)
    return {"latents": segment.clean_latents, "logp": segment.sde_logp, "gradients": backend.gradients}


def layer_refusals(exchange: SumExchange, folder: Path) -> dict[str, str]:
    """What ranks are told that do not divide the layers, or whose model or options are not proven."""
    found = {}
    exchange.size = 4
    makers = {
        "divide": lambda: pipeline_of("qwen3", folder).bundle.cut_layers(exchange),
        "experts": lambda: backend_of("qwen3_moe", folder, TrainTopology(tp=2)),
        "options": lambda: backend_of("qwen3", folder, TrainTopology(tp=2), compile=True),
    }
    for key, make in makers.items():
        try:
            make()
        except ConfigError as error:
            found[key] = str(error)
    return found


def expert_refusals(exchange: RowExchange, folder: Path) -> dict[str, str]:
    """What ranks are told that do not divide the experts, or whose model has none."""
    found = {}
    dense = folder / "dense"
    if dist.get_rank() == 0:
        tiny_text.save_text_model(tiny_text.qwen3(), dense)
    dist.barrier()
    exchange.size = 3
    for key, make in {
        "divide": lambda: pipeline_of("qwen3_moe", folder).bundle,
        "dense": lambda: Qwen3Bundle(str(dense)),
    }.items():
        try:
            make().spread_experts(exchange)
        except ConfigError as error:
            found[key] = str(error)
    return found


def steps_of_rank(names: Sequence[str], case: str, folder: Path, out: Path) -> dict[str, Any]:
    """By family the step in float32; and where all ranks share samples, the calls of its transformers in float64."""
    topology, options = CASES[case].topology, {**dict(CASES[case].fsdp), "lora": CASES[case].lora}
    found: dict[str, Any] = {
        "float32": {name: step_of(name, folder, topology, out / name, **options) for name in names}
    }
    if case in ("sp2", "ring2"):
        found |= {"float64": {}, "attentions": {}, "bytes": {}}
        alone = dist.new_subgroups(1)[0]
        for name in names:
            world = dist.group.WORLD
            # ty: there is a world
            ring = NotingRing(world) if case == "ring2" else None  # ty: ignore[invalid-argument-type]
            exchange = NotingExchange(world, ring and alone, ring)  # ty: ignore[invalid-argument-type]
            of_doubles = shared_doubles_of if name in TEXTS else doubles_of
            found["float64"][name] = of_doubles(name, folder, exchange)
            found["attentions"][name] = exchange.attentions
            both = [exchange] if ring is None else [exchange, ring]
            found["bytes"][name] = (sum(each.bytes_sent for each in both), sum(each.expected_bytes for each in both))
    if case == "sp2":
        found |= refusals("sd3", folder)
        found["texts_differ"] = text_refusal("qwen3", folder, topology)
    if case == "tp2":
        found |= {"float64": {}, "bytes": {}}
        for name in names:
            exchange = NotingSums(dist.group.WORLD)  # ty: ignore[invalid-argument-type]: as above
            found["float64"][name] = shared_doubles_of(name, folder, exchange)
            found["bytes"][name] = (exchange.bytes_reduced, exchange.expected_bytes)
        sums = SumExchange(dist.group.WORLD)  # ty: ignore[invalid-argument-type]: as above
        found["texts_differ"], found["refused"] = text_refusal("qwen3", folder, topology), layer_refusals(sums, folder)
    if case == "ep2":
        found |= {"float64": {}, "rows": {}, "bytes": {}}
        for name in names:
            rows = NotingRows(dist.group.WORLD)  # ty: ignore[invalid-argument-type]: as above
            found["float64"][name] = text_doubles_of(name, folder, rows)
            found["rows"][name] = rows.sent
            found["bytes"][name] = (rows.bytes_sent, rows.expected_bytes)
        exchange = RowExchange(dist.group.WORLD)  # ty: ignore[invalid-argument-type]: as above
        found |= {"one_sided": one_sided(exchange), "refused": expert_refusals(exchange, folder)}
        found["images"] = expert_images(folder, topology)
    if case in ("tp2", "ep2"):
        name = names[0]
        found["resharded"] = [
            resumed(name, folder, out / name, TrainTopology(), out / "shards"),
            resumed(name, folder, out / "shards", topology),
        ]
    return found
