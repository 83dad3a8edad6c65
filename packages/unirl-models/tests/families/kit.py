"""What a family says of itself to be proven equal to its own pipeline; `test_families.py` does the proving.

A family is one module of this folder with a list `FAMILIES`; nothing else is to be registered. Any stands for classes
of diffusers and transformers.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.releases.configurations import OF_RELEASES
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.sampling import DiffusionSamplingParams

TEXTS = ["a red cat", 'two blue dogs on a "hill"', "fog"]
KEYS = ["r0:a", "r0:b", "r0:c"]


@dataclass(frozen=True)
class Published:
    """A released checkpoint: enough to build what trains on the meta device."""

    hub_id: str
    billions: float
    """Parameters of all that trains, as published."""
    components: tuple[str, ...] = ("transformer",)
    """Those that train, and a ControlNet."""

    @property
    def configs(self) -> dict[str, Mapping[str, Any]]:
        """config.json of each component, where it differs from its class's defaults."""
        return {name: OF_RELEASES.get(self.hub_id, {}).get(name, {}) for name in self.components}


@dataclass(frozen=True)
class Family:
    """One task of one model family, at tiny size."""

    name: str
    bundle: type[DiffusersBundle]
    pipeline: type[DiffusersPipeline]
    tiny: Callable[[], Any]
    """A random stock pipeline of the family's real classes, in evaluation mode."""
    params: Mapping[str, Any]
    """Sampling of the first size, with guidance where the family has it; see `sampling` for the defaults."""
    call: Callable[[Request], dict[str, Any]]
    """Keywords of the stock pipeline's call besides steps, generator and output type."""
    from_stock: Callable[[Tensor, Request], Tensor] = lambda latents, _: latents
    """Our latents of those that the stock pipeline returns for output_type="latent"."""
    arrange: Callable[[Any, Request], object] = lambda stock, request: None
    """Sets what the stock pipeline takes as attributes, not as keywords of its call."""
    latents_of: Callable[[tuple[Any, ...]], Any] = lambda outputs: outputs[0]
    """What of the stock pipeline's outputs `from_stock` reads for output_type="latent"."""
    cut_frames: int = 0
    """Frames before the video that are sampled and cut off; of latents the first frame, see `shown`."""
    encodes_media: bool = True
    """True if media can be made latents; else the adapter refuses them."""
    other_size: Mapping[str, Any] = field(default_factory=lambda: {"height": 32, "width": 48})
    unguided: Mapping[str, Any] | None = field(default_factory=lambda: {"guidance_scale": 1.0})
    """What switches guidance off; None for a family that has none to switch."""
    inputs: Callable[[int], dict[str, Primitive]] = lambda num_samples: {}
    """What a request brings besides its texts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the bundle besides its folder."""
    is_latent_batch: bool = True
    """True if the stock pipeline takes several prompts at once; else the reference runs prompt by prompt."""
    keeps_scheduler: bool = False
    """True if the stock pipeline walks its own scheduler instead of our levels pinned."""
    levels: Callable[[Any], Tensor] = lambda scheduler: scheduler.sigmas
    """Sigmas [T + 1] of flow matching of the stock pipeline's scheduler, its timesteps set."""
    schedule: str | None = None
    """Convention of the stock pipeline where it is not the family's default."""
    tiled_side: int = 96
    """Pixels on a side of what is decoded in tiles: enough for sixteen of them."""
    tile: int | None = 32
    """Pixels on a side of a tile; None for a tiny decoder that holds no more than the pixels that it makes."""
    makes_chunks: bool = False
    """True if a video is made chunk by chunk: replays read the history of each in the segment, and samples are walked
    alone and to their end, see `ALONE` of the contract."""
    tolerance: float = 1e-5
    """Largest relative error against the stock pipeline; a family with more says why next to it."""
    load_lora: Callable[[Any, Path], None] = lambda stock, folder: stock.load_lora_weights(str(folder))
    """How a LoRA export is loaded."""
    published: tuple[Published, ...] = ()
    stock: Callable[[Path], Any] | None = None
    """Loads the stock pipeline of a folder; None where the class that the folder names does by itself."""

    def shown(self, latents: Tensor) -> Tensor:
        """What of our latents the stock pipeline returns."""
        return latents[:, :, 1:] if self.cut_frames else latents

    def sampling(self, **changes: Any) -> DiffusionSamplingParams:
        """Five steps in float32, every one stochastic."""
        fields: dict[str, Any] = {
            "num_inference_steps": 5,
            "guidance_scale": 3.0,
            "negative_prompt": "bad",
            "height": 32,
            "width": 32,
            "eta": 0.7,
            "autocast_precision": "fp32",
        }
        return DiffusionSamplingParams(**{**fields, **self.params, **changes})


@dataclass(frozen=True)
class Request:
    """What our sampling and the stock pipeline's are both given."""

    texts: list[str]
    params: DiffusionSamplingParams
    noise: Tensor
    """In our layout."""
    inputs: dict[str, Primitive]

    @property
    def negative(self) -> list[str]:
        """The negative prompt of each sample."""
        return [self.params.negative_prompt or ""] * len(self.texts)


def stock_call(request: Request, *, guidance: str | None = "guidance_scale", **more: Any) -> dict[str, Any]:
    """Keywords that nearly every stock pipeline takes, and `more`, which may replace some.

    guidance: the one of classifier-free guidance; None for a pipeline without.
    """
    params = request.params
    return {
        "prompt": request.texts,
        "negative_prompt": request.negative,
        **({} if guidance is None else {guidance: params.guidance_scale}),
        "height": params.height,
        "width": params.width,
        "latents": request.noise.clone(),
        **more,
    }


def quiet(pipeline: Any) -> Any:
    """A stock pipeline without progress bars, its modules in evaluation mode (several are made in training mode)."""
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    return pipeline


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make` with the weights of seed 0, parameters that a class leaves uninitialised or zero included."""

    def made() -> Any:
        torch.manual_seed(0)
        pipeline = quiet(make())
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                for parameter in component.parameters():
                    if not bool(parameter.isfinite().all()) or not bool(parameter.any()):
                        nn.init.normal_(parameter.data, std=0.02)
        return pipeline

    return made


class PinnedEuler(FlowMatchEulerDiscreteScheduler):
    """Walks the given sigmas, whatever a pipeline asks for, so that both sides walk the same ones."""

    pinned: Tensor

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        self.sigmas = self.pinned.to(torch.float32)
        self.timesteps = self.sigmas[:-1] * self.config["num_train_timesteps"]
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = None


def pinned(sigmas: Tensor) -> Any:
    """A scheduler that walks `sigmas`."""
    scheduler = PinnedEuler(shift=1.0)
    scheduler.pinned = sigmas
    return scheduler


@dataclass
class Loaded:
    """A family's folder, read by both sides."""

    family: Family
    folder: Path
    ours: DiffusersPipeline
    stock: Any

    def request(self, params: DiffusionSamplingParams) -> Request:
        """Three prompts with the noise of their keys."""
        noise = initial_noise(KEYS, params.seed, self.ours.latent_shape(params))
        return Request(list(TEXTS), params, noise, self.family.inputs(len(TEXTS)))

    def sample(self, request: Request) -> Tensor:
        """Our deterministic latents."""
        params = dataclasses.replace(request.params, eta=0.0)
        with self.ours.evaluating():
            conditions = self.ours.encode({"text": Texts(texts=request.texts), **request.inputs}, params)
            sigmas = self.ours.sigmas(params)
            segment = self.ours.diffuse(
                conditions, request.noise, sigmas, params, noise_keys=KEYS[: len(request.noise)]
            )
        return segment.clean_latents

    def reference(self, request: Request, sigmas: Tensor, output_type: str = "latent") -> Any:
        """What the stock pipeline makes of the same request and sigmas."""
        if not self.family.keeps_scheduler:
            self.stock.scheduler = pinned(sigmas)
        self.family.arrange(self.stock, request)
        call = self.family.call(request)
        with torch.no_grad():
            outputs = self.stock(
                **call,
                num_inference_steps=request.params.num_inference_steps,
                output_type=output_type,
                return_dict=False,
            )
        return self.family.latents_of(outputs) if output_type == "latent" else outputs[0]

    def reference_latents(self, request: Request) -> Tensor:
        """The stock pipeline's deterministic latents in our layout."""
        sigmas = self.ours.sigmas(request.params)
        if self.family.is_latent_batch:
            return self.family.from_stock(self.reference(request, sigmas), request)
        rows = []
        for row in range(len(request.texts)):
            inputs = {name: value.select([row]) for name, value in request.inputs.items()}
            one = Request(request.texts[row : row + 1], request.params, request.noise[row : row + 1], inputs)
            rows.append(self.family.from_stock(self.reference(one, sigmas), one))
        return torch.cat(rows)


@cache
def families() -> dict[str, Family]:
    """Every family of every module of this folder, by name."""
    return {family.name: family for listed in _modules() for family in listed}


def first_of_each() -> frozenset[str]:
    """The name that each module lists first: what one family's tasks have in common is tested on it."""
    return frozenset(listed[0].name for listed in _modules())


def _modules() -> list[list[Family]]:
    package = __package__ or ""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    names = [name for name in names if not name.startswith("test_")]
    listed = [getattr(importlib.import_module(f"{package}.{name}"), "FAMILIES", []) for name in names]
    return [each for each in listed if each]


def ours(name: str, folder: Path) -> DiffusersPipeline:
    """A family by our code, from a folder that is written where it is not there yet."""
    family = families()[name]
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        family.tiny().save_pretrained(partial)
        partial.rename(folder)
    return family.pipeline(family.bundle(str(folder), **family.options), FlowSDEStrategy())


def load(name: str, folder: Path) -> Loaded:
    """A family saved as a real folder and loaded by our code and by the stock class."""
    pipeline = ours(name, folder)
    return Loaded(families()[name], folder, pipeline, stock_of(folder))


def stock_of(folder: Path) -> Any:
    """The stock pipeline of a folder. Its weights are read-only; tests set its scheduler."""
    name = index_of_folder(folder)["_class_name"]
    for family in families().values():
        if family.stock is not None and name in family.bundle.pipeline_classes:
            return quiet(family.stock(folder))
    return quiet(getattr(diffusers, name).from_pretrained(folder))


def scheduler_of(folder: Path) -> Any:
    """The scheduler of a folder as its pipeline has it."""
    return getattr(diffusers, index_of_folder(folder)["scheduler"][1]).from_pretrained(folder, subfolder="scheduler")


def index_of_folder(folder: Path) -> dict[str, Any]:
    """The index of a pipeline, of blocks too."""
    [file] = folder.glob("*model_index.json")
    return json.loads(file.read_text())


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def pixels(media: Images | Videos) -> Tensor:
    """One entry per sample."""
    return media.pixels if isinstance(media, Images) else media.frames
