"""The contract of a diffusion model: five questions, and a bundle that says what trains.

Nothing here walks a schedule, draws noise or knows a kernel: `unirl.models.diffusion` does that for every adapter. How
models with several experts, packed sequences or state across steps answer: docs/design/model-adapter.md.
Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Modality, Primitive, Texts, Videos
from unirl.types.protocols.models import Conditions, ModelBundle
from unirl.types.sampling import DiffusionSamplingParams

# The model's clock: a flow-matching transformer is fed 1000 sigma. Kept in float: int timesteps would merge noise
# levels that a fine or shifted schedule tells apart.
TIMESTEPS_PER_SIGMA = 1000.0

NEUTRAL: Mapping[str, float | None] = {
    "num_frames": 1,
    "guidance_scale": 1.0,
    "guidance_scale_2": None,
    "distilled_guidance_scale": None,
    "max_sequence_length": None,
}
"""Sampling parameters that not every family has, with the value that asks for nothing."""

C = TypeVar("C", bound=Condition)


class DiffusionAdapter(ABC):
    """What a diffusion model answers. One per family; it holds the modules through its bundle."""

    modality: ClassVar[Modality] = Modality.IMAGE
    """What `decode` makes: IMAGE or VIDEO."""

    @property
    @abstractmethod
    def bundle(self) -> ModelBundle:
        """The bare modules: what trains, which blocks wrap, how weights are exported."""

    @abstractmethod
    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of ONE latent, without the sample axis.

        Raises ConfigError if height, width or num_frames do not divide, naming sizes that do.
        """

    @abstractmethod
    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """Image tokens of one sample after patching: what a resolution-dependent schedule depends on."""

    @abstractmethod
    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples by slot ("text", "negative_text", ...), one row per sample, without gradient.

        Raises ConfigError if `params` asks for guidance and names no negative prompt.
        """

    @abstractmethod
    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """velocity(x_R, sigma_R, step_R) -> [R, ...] float32; `conditions` has one row per row of x.

        Guidance is applied inside. Rows may mix steps, so each carries its own sigma; a row's velocity depends on that
        row alone. Bound once per trajectory or replay: the result may hold state (a KV cache of the conditions).
        Gradients flow to the modules that train when gradients are on.
        """

    def starting_latents(self, latents: Tensor, sigma: float, conditions: Conditions) -> Tensor:
        """The latents [B, ...] that a trajectory starts from, in the coordinates of flow matching at `sigma`.

        latents: as the model's own pipeline takes them, unit noise for most. A flow-matching model keeps them, or mixes
        in a little of a given image; one of the variance-preserving process scales them, see
        `unirl.sde.variance_preserving`.
        """
        del sigma, conditions
        return latents

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Clean latents [B, ...] of media, float32, without gradient: the mode of the encoder's distribution.

        Raises ConfigError if the family has no encoder of media.
        """
        raise ConfigError(
            f"{type(self).__name__} does not encode images, so it cannot train on given ones. Sample them instead: "
            "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine."
        )

    def encode_texts(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Those of the conditions that text encoders make, which are then remembered: all but what a family with none
        of its own has."""
        del primitives, params
        return {}

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        """Tokens of each text that the model does not read, because the text is too long for every encoder. None,
        where an adapter says nothing else."""
        del params
        return [0] * len(texts)

    @property
    def encoders_rest(self) -> bool:
        """True if text encoders rest in host memory and are on the device only while prompts are encoded."""
        return False

    def visiting_encoders(self) -> AbstractContextManager[None]:
        """Text encoders that rest leave the device at its end, not after each call of `encode_texts`."""
        return nullcontext()

    def drop_text_encoders(self) -> None:
        """Free the text encoders. Raises ConfigError if the model has none to free."""
        raise ConfigError(f"{type(self).__name__} has no text encoders to drop. Set engine.drop_text_encoders: false.")

    @abstractmethod
    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Media of clean latents [B, ...] that were sampled with `params`: float32 in [0, 1]. Differentiable when
        gradients are on."""


def timesteps(sigma_R: Tensor, dtype: torch.dtype) -> Tensor:
    """1000 sigma for a model that embeds its timestep in the timestep's own type, [R].

    dtype: of the model's weights. Under autocast, which casts for the weights, the embedding keeps float32.
    """
    is_mixed = torch.is_autocast_enabled(sigma_R.device.type)
    return (sigma_R * TIMESTEPS_PER_SIGMA).to(torch.float32 if is_mixed else dtype)


def check_multiples(params: DiffusionSamplingParams, multiple: int, *, reason: str) -> None:
    """Raises ConfigError unless height and width are multiples of `multiple`, naming the nearest sizes that are.

    reason: where the multiple comes from, for the message ("VAE 8 x patch 2").
    """
    for name, value in (("height", params.height), ("width", params.width)):
        if value % multiple:
            below = value // multiple * multiple
            nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise ConfigError(f"{name} = {value} is not a multiple of {multiple} ({reason}). Use {name} = {nearest}.")


def refuse_ignored(
    params: DiffusionSamplingParams, family: str, used: Collection[str], used_sampler_kwargs: Collection[str]
) -> None:
    """Raises ConfigError for a parameter that asks for something and that the family does not use.

    used: names of `NEUTRAL` that the family reads. used_sampler_kwargs: keys of `sampler_kwargs` that it reads.
    """
    values = {name: getattr(params, name) for name in NEUTRAL}
    for name, value in values.items():
        if name not in used and value != NEUTRAL[name]:
            neutral = "null" if NEUTRAL[name] is None else NEUTRAL[name]
            raise ConfigError(f"{name} = {value} means nothing to {family}. Set sampling.{name}: {neutral}.")
    unknown = sorted(set(params.sampler_kwargs) - set(used_sampler_kwargs))
    if unknown:
        raise ConfigError(
            f"sampler_kwargs {unknown} mean nothing to {family}; it knows only {sorted(used_sampler_kwargs)}."
        )


def refuse_unread(primitives: Mapping[str, Primitive], family: str, read: Collection[str]) -> None:
    """Raises ConfigError for inputs of a request that the family would leave out.

    read: slots of the request that it reads.
    """
    unread = {name: type(value).__name__ for name, value in primitives.items() if name not in read}
    if unread:
        raise ConfigError(
            f"{family} reads {sorted(read)} of a request, which also brings {unread}. Take these out of the data, or "
            "choose a model that is conditioned on them."
        )


def require_texts(primitives: Mapping[str, Primitive], family: str) -> list[str]:
    """The prompts of a request, at least one. Raises ContractError if there are none."""
    texts = primitives.get("text")
    if not isinstance(texts, Texts) or not texts.texts:
        got = {name: type(value).__name__ for name, value in primitives.items()}
        raise ContractError(f"{family} is conditioned on text: primitives need 'text': Texts of B prompts, got {got}")
    return texts.texts


def require_condition(conditions: Conditions, slot: str, kind: type[C]) -> C:
    """The condition of a slot. Raises ContractError if it is missing or of another kind, naming what is there."""
    condition = conditions.get(slot)
    if not isinstance(condition, kind):
        there = {name: type(value).__name__ for name, value in conditions.items()}
        raise ContractError(f"conditions need {slot!r}: {kind.__name__}; got {there}. Build them with encode().")
    return condition


def num_rows(conditions: Conditions) -> int:
    """How many rows the conditions hold. Raises ContractError if slots disagree or there is none."""
    sizes = {name: condition.batch_size for name, condition in conditions.items()}
    if len(set(sizes.values())) != 1:
        raise ContractError(f"conditions must all hold the same number of rows, got {sizes}")
    return next(iter(sizes.values()))


def select_rows(conditions: Conditions, rows: list[int]) -> dict[str, Condition]:
    """Rows of every slot, repeats allowed."""
    return {name: condition.select(rows) for name, condition in conditions.items()}
