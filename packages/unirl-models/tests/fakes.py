"""Three hand-written models that stand for the families whose shape differs most from SD3.

`TwoExpertAdapter` stands for Wan 2.2: video latents [C, F, H, W], two transformers of which one serves the rows with
sigma >= boundary and the other the rest, each with its own guidance scale; both train.
`PackedAdapter` stands for BAGEL: latents are a sequence [L, D], samples have different numbers of text tokens and are
packed end to end into one sequence, the text part is frozen and its keys and values are computed once when bound.
`TimestepAdapter` stands for SDXL: a variance-preserving model of z and an integer timestep that predicts the noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from unirl.models.adapter import DiffusionAdapter, check_multiples, require_condition, select_rows
from unirl.models.experts import RankFollowing, routed
from unirl.models.guidance import Guidance, classifier_free, require_negative_prompt
from unirl.sde.loop import Velocity
from unirl.sde.timesteps import TimestepSchedule
from unirl.sde.variance_preserving import flow_velocity, from_flow, to_flow
from unirl.types.conditions import Condition, TextEmbedCondition, TextTokenCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Modality, Primitive, Texts, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

WIDTH = 8


@dataclass
class FakeBundle(RankFollowing):
    """Modules by name, and which of them train."""

    modules: dict[str, nn.Module]
    trains: tuple[str, ...]
    block_class_names: tuple[str, ...] = ("Linear",)
    lora_target_modules: tuple[str, ...] = ("out",)

    def __post_init__(self) -> None:
        for name, module in self.modules.items():
            module.eval().requires_grad_(name in self.trains)

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {name: self.modules[name] for name in self.trains}

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        raise AssertionError("no test exports a fake")

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        raise AssertionError("no test exports a fake")


class FakeAdapter(DiffusionAdapter):
    """Reads prompts, and the negative prompt where guidance is on."""

    _bundle: FakeBundle

    @property
    def bundle(self) -> FakeBundle:
        return self._bundle

    @abstractmethod
    def read(self, texts: list[str]) -> Condition: ...

    @torch.no_grad()
    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        texts = primitives["text"]
        assert isinstance(texts, Texts)
        conditions = {"text": self.read(texts.texts)}
        if params.uses_guidance:
            conditions["negative_text"] = self.read([require_negative_prompt(params)] * len(texts.texts))
        return conditions


def embedded(bundle: FakeBundle, texts: list[str]) -> TextEmbedCondition:
    """One vector per text: the mean over its bytes."""
    encoder = bundle.modules["text_encoder"]
    pooled = torch.stack([encoder(torch.tensor([1, *text.encode()])).mean(0) for text in texts])
    return TextEmbedCondition(embeds=pooled[:, None], pooled=pooled)


class Expert(nn.Module):
    """A velocity [R, C, F, H, W] from the latent, the noise level and one text vector."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.into = nn.Conv3d(channels, WIDTH, 1)
        self.time = nn.Linear(1, WIDTH)
        self.text = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Conv3d(WIDTH, channels, 1)

    def forward(self, x_R: Tensor, sigma_R: Tensor, text_RP: Tensor) -> Tensor:
        shift = self.time(sigma_R[:, None]) + self.text(text_RP)
        return self.out(torch.tanh(self.into(x_R) + shift[:, :, None, None, None]))


class TwoExpertAdapter(FakeAdapter):
    """See the module docstring. Pixels are 4 per latent element on a side, and 4 frames per latent frame after one."""

    modality = Modality.VIDEO
    boundary = 0.7
    channels = 3

    def __init__(self) -> None:
        torch.manual_seed(0)
        experts = {"transformer": Expert(self.channels), "transformer_2": Expert(self.channels)}
        self._bundle = FakeBundle({**experts, "text_encoder": nn.Embedding(256, WIDTH)}, trains=tuple(experts))

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        check_multiples(params, 4, reason="VAE 4")
        if (params.num_frames - 1) % 4:
            raise ConfigError(f"num_frames = {params.num_frames} must be 4 k + 1. Use num_frames = 5 or 9.")
        return self.channels, (params.num_frames - 1) // 4 + 1, params.height // 4, params.width // 4

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        _, frames, height, width = self.latent_shape(params)
        return frames * height * width

    def read(self, texts: list[str]) -> TextEmbedCondition:
        return embedded(self.bundle, texts)

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        # As in diffusers' WanPipeline: the first scale alone decides whether there is guidance at all.
        scale_2 = params.guidance_scale_2 if params.uses_guidance and params.guidance_scale_2 else params.guidance_scale
        conditional = {"text": conditions["text"]}
        negative = {"text": conditions["negative_text"]} if params.uses_guidance else None

        def expert_velocity(name: str, scale: float, rows: list[int], x: Tensor, sigma: Tensor, step: Tensor) -> Tensor:
            expert = self.bundle.modules[name]

            def predict(x_R: Tensor, sigma_R: Tensor, conditions_R: Conditions) -> Tensor:
                return expert(x_R, sigma_R, require_condition(conditions_R, "text", TextEmbedCondition).pooled)

            part = None if negative is None else select_rows(negative, rows)
            guided = classifier_free(predict, select_rows(conditional, rows), part, Guidance(scale))
            return guided(x, sigma, step)

        experts = [
            partial(expert_velocity, "transformer", params.guidance_scale),
            partial(expert_velocity, "transformer_2", scale_2),
        ]
        return routed(experts, lambda sigma_R: (sigma_R < self.boundary).long(), self.bundle.any_rank)

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Videos:
        frames = []
        for latent in latents.float():
            clip = nn.functional.interpolate(latent, scale_factor=4).transpose(0, 1)
            frames.append(torch.cat([clip[:1], clip[1:].repeat_interleave(4, dim=0)]).sigmoid())
        return Videos.pack(frames=frames)


class PackedAdapter(FakeAdapter):
    """See the module docstring. A token is a patch of 4 x 4 pixels; attention is within a sample."""

    token_width = 3

    def __init__(self) -> None:
        torch.manual_seed(1)
        modules: dict[str, nn.Module] = {
            "understanding": nn.Embedding(256, 2 * WIDTH),
            "generation": nn.ModuleDict(
                {
                    "into": nn.Linear(self.token_width + 1, 3 * WIDTH),
                    "out": nn.Linear(WIDTH, self.token_width),
                }
            ),
        }
        self._bundle = FakeBundle(modules, trains=("generation",))
        self.num_text_passes = 0

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        return self.image_seq_len(params), self.token_width

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        check_multiples(params, 4, reason="patch 4")
        return (params.height // 4) * (params.width // 4)

    def read(self, texts: list[str]) -> TextTokenCondition:
        rows = [torch.tensor([1, *text.encode()]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return TextTokenCondition(input_ids=ids, attention_mask=mask)

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        guidance = Guidance.from_params(params)
        contexts = self._contexts(require_condition(conditions, "text", TextTokenCondition))
        negative = (
            self._contexts(require_condition(conditions, "negative_text", TextTokenCondition)) if guidance.is_on else []
        )

        def velocity(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            rows = guidance.guided_rows(sigma_R)
            rows = list(range(len(x_R))) if rows is None else rows
            everything = torch.cat([x_R[rows], x_R]), torch.cat([sigma_R[rows], sigma_R])
            out = self._packed_forward(*everything, [negative[row] for row in rows] + contexts)
            uncond, cond = out.split([len(rows), len(x_R)])
            index = torch.tensor(rows, dtype=torch.long)
            return cond.index_copy(0, index, uncond + guidance.scale * (cond[index] - uncond))

        return velocity

    @torch.no_grad()
    def _contexts(self, text: TextTokenCondition) -> list[Tensor]:
        """The state of a bound velocity: keys and values of each row's text, [tokens of the row, 2 D]."""
        self.num_text_passes += 1
        lengths = text.attention_mask.sum(1).tolist()
        embed = self.bundle.modules["understanding"]
        return [embed(ids[:length]) for ids, length in zip(text.input_ids, lengths, strict=True)]

    def _packed_forward(self, x_R: Tensor, sigma_R: Tensor, contexts: list[Tensor]) -> Tensor:
        model = self.bundle.modules["generation"]
        assert isinstance(model, nn.ModuleDict)
        rows, tokens, _ = x_R.shape
        level = sigma_R[:, None, None].expand(rows, tokens, 1)
        q, k, v = model["into"](torch.cat([x_R, level], dim=-1)).chunk(3, dim=-1)
        keys, values, owner = [], [], []
        for row, context in enumerate(contexts):
            text_k, text_v = context.chunk(2, dim=-1)
            keys += [text_k, k[row]]
            values += [text_v, v[row]]
            owner += [row] * (len(context) + tokens)
        query_owner = torch.arange(rows).repeat_interleave(tokens)
        allowed = query_owner[:, None] == torch.tensor(owner)[None, :]
        score = (q.flatten(0, 1) @ torch.cat(keys).T / WIDTH**0.5).masked_fill(~allowed, -torch.inf)
        return model["out"](score.softmax(-1) @ torch.cat(values)).reshape(rows, tokens, -1)

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        side = int(latents.shape[1] ** 0.5)
        grid = latents.float().transpose(1, 2).reshape(len(latents), self.token_width, side, side)
        return Images(pixels=nn.functional.interpolate(grid, scale_factor=4).sigmoid())


class NoisePredictor(nn.Module):
    """The noise in z [R, C, H, W] at integer timesteps, given one text vector."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(channels, WIDTH, 1)
        self.time = nn.Embedding(1000, WIDTH)
        self.text = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Conv2d(WIDTH, channels, 1)

    def forward(self, z_R: Tensor, timestep_R: Tensor, text_RP: Tensor) -> Tensor:
        shift = self.time(timestep_R) + self.text(text_RP)
        return self.out(torch.tanh(self.into(z_R) + shift[:, :, None, None]))


class TimestepAdapter(FakeAdapter):
    """See the module docstring. Pixels are 4 per latent element on a side."""

    channels = 3

    def __init__(self, schedule: TimestepSchedule) -> None:
        torch.manual_seed(0)
        modules: dict[str, nn.Module] = {"unet": NoisePredictor(self.channels)}
        modules["text_encoder"] = nn.Embedding(256, WIDTH)
        self.schedule = schedule
        self._bundle = FakeBundle(modules, trains=("unet",))

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        check_multiples(params, 4, reason="VAE 4")
        return self.channels, params.height // 4, params.width // 4

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        return params.height // 4 * (params.width // 4)

    def read(self, texts: list[str]) -> TextEmbedCondition:
        return embedded(self.bundle, texts)

    def starting_latents(self, latents: Tensor, sigma: float, conditions: Conditions) -> Tensor:
        del conditions
        return to_flow(latents, torch.full(latents.shape[:1], sigma))

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        negative = {"text": conditions["negative_text"]} if params.uses_guidance else None
        return classifier_free(self._predict, {"text": conditions["text"]}, negative, Guidance.from_params(params))

    def _predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions) -> Tensor:
        pooled = require_condition(conditions, "text", TextEmbedCondition).pooled
        timestep_R = self.schedule.timestep_of(sigma_R)
        output = self.bundle.modules["unet"](from_flow(x_R, sigma_R), timestep_R, pooled)
        return flow_velocity(output, x_R, sigma_R, "epsilon")

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        pixels = latents.repeat_interleave(4, dim=-1).repeat_interleave(4, dim=-2)
        return Images(pixels=(pixels / 2 + 0.5).clamp(0, 1))
