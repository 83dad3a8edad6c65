"""A model whose weights are read at once and one whose shards are read by their ranks: what each of some ranks runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from family_steps import LEVELS, kit
from torch import Tensor
from torch.distributed.tensor import DTensor

from unirl.models.bagel.bundle import BagelBundle
from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.train.configs import FSDPConfig, LoraConfig, OptimizerConfig
from unirl.types.media import Texts

tested_backend: Any = importlib.import_module("tested_backend")  # of the tests of unirl-train
tiny_text: Any = importlib.import_module("packages.unirl-models.tests.tiny_text")
tiny_bagel: Any = importlib.import_module("packages.unirl-models.tests.tiny_bagel")
tiny_hunyuan_image3: Any = importlib.import_module("packages.unirl-models.tests.tiny_hunyuan_image3")

DIFFUSERS = ["sd3", "wan22_t2v"]
"""One with a single transformer, and one with two experts and buffers that no file has."""
LANGUAGE: dict[str, Callable[[], Any]] = {
    "qwen3_tied": lambda: tiny_text.qwen3(tie_word_embeddings=True),
    "qwen3_moe": lambda: tiny_text.qwen3_moe(),
    "qwen3_5": lambda: tiny_text.qwen3_5(),
}
"""One whose output projection is its embedding, one whose experts are stacked as they are loaded, and one that has
parameters besides projections and norms."""
PACKED: dict[str, tuple[Callable[..., Any], Callable[[Path], Any]]] = {
    "bagel": (partial(BagelBundle, trains="both"), tiny_bagel.save_bagel),
    "hunyuan_image3": (partial(HunyuanImage3Bundle, trains="all"), tiny_hunyuan_image3.save_hunyuan_image3),
}
"""Whose decoders lie in the files of a whole model."""
NAMES = [*DIFFUSERS, *LANGUAGE, *PACKED]
NUM_STEPS = 3

Forward = Callable[[], Tensor]


def whole(tensor: Tensor) -> Tensor:
    """A copy of the unsharded values."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def diffusion(name: str, folder: Path, dtype: str, *, defers_weights: bool) -> tuple[Any, Forward]:
    """A family's bundle, and the velocities of this rank's share of four rows."""
    family = kit.families()[name]
    options = {**family.options, "dtype": dtype, "defers_weights": defers_weights}
    bundle = family.bundle(str(folder / name), **options)
    pipeline = family.pipeline(bundle, kit.FlowSDEStrategy())
    params = family.sampling()
    conditions = pipeline.encode({"text": Texts(texts=[*kit.TEXTS, kit.TEXTS[0]])}, params)
    noise = torch.randn(len(LEVELS), *pipeline.latent_shape(params), generator=torch.Generator().manual_seed(0))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = len(LEVELS) // world
    mine = slice(rank * share, (rank + 1) * share)
    rows = {slot: condition.slice(mine.start, mine.stop) for slot, condition in conditions.items()}
    return bundle, lambda: pipeline.velocity(rows, noise[mine], LEVELS[mine], torch.arange(share), params)


def language(name: str, folder: Path, dtype: str, *, defers_weights: bool) -> tuple[Any, Forward]:
    """A language model's bundle, and the logits of this rank's share of four rows."""
    make = PACKED[name][0] if name in PACKED else CausalLMBundle
    bundle = make(str(folder / name), dtype, defers_weights=defers_weights)
    ids = torch.randint(0, 256, (4, 6), generator=torch.Generator().manual_seed(0))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = ids.chunk(world)[rank]
    positions = torch.arange(ids.shape[1]).expand_as(mine)
    return bundle, lambda: bundle.model(input_ids=mine, position_ids=positions, use_cache=False).logits


def written(folder: Path) -> None:
    """All folders, where they are not there yet."""
    for name in DIFFUSERS:
        kit.ours(name, folder / name)
    for name, make in LANGUAGE.items():
        if not (folder / name).exists():
            tiny_text.save_text_model(make(), folder / name)
    for name, (_, save) in PACKED.items():
        if not (folder / name).exists():
            save(folder / name)


def built(make: Callable[..., tuple[Any, Forward]], dtype: str, lora: LoraConfig | None, *, defers: bool) -> Any:
    """Everything that a run sees of a model that trains: state after building, a forward, and the state after steps."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # ranks draw differently, and start from what rank 0 drew
    bundle, forward = make(dtype, defers_weights=defers)
    assert bundle.defers_weights == defers
    backend = tested_backend.backend_class()(
        bundle,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        fsdp=FSDPConfig(param_dtype=dtype, reduce_dtype="fp32"),
        lora=lora,
    )
    found: dict[str, Tensor] = {"random": torch.get_rng_state()}
    for component, module in bundle.trainable_modules().items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[f"{component}.{name}"] = whole(parameter)
        found |= {f"{component}.{name}": buffer.clone() for name, buffer in module.named_buffers()}
    found["kinds"] = torch.tensor([parameter.requires_grad for parameter in _parameters(bundle)])
    for step in range(NUM_STEPS):
        backend.zero_grad()
        output = forward()
        found[f"forward {step}"] = output.detach().clone()
        output.float().square().mean().backward()
        backend.optimizer_step(1.0)
    found |= {f"trained {name}": whole(parameter) for name, parameter in backend.parameters.items()}
    backend.close()
    return found


def differences(names: list[str], folder: Path, *, is_whole: bool) -> dict[str, list[str]]:
    """What differs between the two ways of building, by model, dtype and kind of training. is_whole: of all four of
    these, else of two."""
    lora = LoraConfig(rank=2, alpha=4.0)
    ways = [("fp32", None), ("bf16", lora), *([("fp32", lora), ("bf16", None)] if is_whole else [])]
    found = {}
    for name in names:
        make = partial(diffusion if name in DIFFUSERS else language, name, folder)
        for dtype, adapters in ways:
            at_once, in_parts = (built(make, dtype, adapters, defers=defers) for defers in (False, True))
            assert at_once.keys() == in_parts.keys()
            found[f"{name} {dtype} {'full' if adapters is None else 'lora'}"] = [
                key for key, value in at_once.items() if not _is_same(value, in_parts[key])
            ]
    return found


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


def _parameters(bundle: Any) -> list[Tensor]:
    return [parameter for module in bundle.trainable_modules().values() for parameter in module.parameters()]
