"""What a recipe takes of each GPU, phase by phase, from published sizes. Reads no weights and imports no torch.

An estimate: weights and what optimizers keep are arithmetic, activations are a count per token, and neither the
allocator's fragments nor the buffers of collectives are in it. Bytes of 1e9 to the GB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unirl.config.placement import groups_of_run
from unirl.config.runs import ComposedRun
from unirl.models.released import Released, all_released
from unirl.types.errors import ConfigError
from unirl.types.recipe import Part

GB = 1e9
ADAPTED_LAYERS = 8
"""Linear layers of a block that LoRA adapts, about."""
PRODUCTS = 0.7
"""Results of matrix products and attention in what a block keeps for its backward pass: 0.62 to 0.78 in blocks with
LoRA that were counted."""
ROOM = 0.9
"""Share of a GPU's memory that an estimate may fill."""
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Phase:
    """One phase of a step on one GPU."""

    name: str
    parts: Mapping[str, float]
    """Bytes by what they are for."""

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def phases(run: ComposedRun) -> list[Phase]:
    """Start, rollout, decoding and training of a run of one diffusion model.

    Raises ConfigError for a checkpoint whose sizes are not known, for a run of several policies, and for one that
    samples anything but images or videos.
    """
    if len(run.all_policies) + len(run.teachers) > 1:
        raise ConfigError("memory is estimated for one policy, this recipe has several.")
    model = run.policy.bundle.node.get("pretrained_model")
    released = all_released()
    sizes = released.get(str(model))
    if sizes is None:
        raise ConfigError(
            f"the sizes of bundle.pretrained_model = {model} are not known. Memory is estimated for: "
            f"{', '.join(sorted(released))}."
        )
    if run.sampling.get("height") is None:
        shown = "has several stages" if run.is_staged else f"has the sampling {run.sampling.name}"
        raise ConfigError(f"memory is estimated for images and videos alone, this recipe {shown}.")
    return _Estimate(run, sizes).phases()


def peak(found: Sequence[Phase]) -> Phase:
    """The phase that takes most."""
    return max(found, key=lambda phase: phase.num_bytes)


def table(found: Sequence[Phase]) -> Iterator[str]:
    """Lines for people: every phase with its parts, the largest marked."""
    largest = peak(found)
    for phase in found:
        parts = ", ".join(f"{name} {value / GB:.1f}" for name, value in phase.parts.items() if value >= 0.05 * GB)
        mark = "  <- most" if phase is largest else ""
        yield f"  {phase.name:8} {phase.num_bytes / GB:6.1f} GB per device: {parts}{mark}"


class _Estimate:
    """The numbers of one recipe that bytes follow from."""

    def __init__(self, run: ComposedRun, sizes: Released) -> None:
        self.run, self.sizes = run, sizes
        policy, sampling = run.policy, run.sampling
        self.bundle, self.backend = policy.bundle, policy.backend
        self.algorithm = next(iter(policy.algorithms.values()))
        self.fsdp: Mapping[str, object] = self.backend.get("fsdp") or {}
        self.num_devices = len(groups_of_run(run)[0].devices)
        topology = self.backend.inner.get("topology")
        self.num_sharing = policy.ranks_per_sample
        """Ranks that work on the same samples, each on its part of their tokens."""
        self.num_shards = self.num_devices // (1 if topology is None else topology.get("dp_replicate"))
        self.pixels = sampling.get("height") * sampling.get("width")
        self.frames = sampling.get("num_frames", 1)
        self.num_samples = run.batch_size * sampling.get("samples_per_prompt", 1) * self.num_sharing // self.num_devices
        self.num_branches = 2 if sampling.get("guidance_scale", 1.0) > 1 else 1

    def phases(self) -> list[Phase]:
        """In the order of a step."""
        kept, made = self.weights(), self.samples()
        step = {**kept, "gathered blocks": self.gathered()}
        sampling = {**step, **made, "engine's model": self.engine_weights()}
        asleep = 0.0 if self.run.file.residency.sleep_engine else self.engine_weights()
        visit = {"text encoders": self._text_bytes()} if self.bundle.get("rest_text_encoders") else {}
        encode = [Phase("encode", {**kept, **visit, "engine's model": self.engine_weights()})] if visit else []
        return [
            Phase("start", self.start()),
            *encode,
            Phase("rollout", {**sampling, "activations": self.rollout_activations()}),
            Phase("decode", {**sampling, "decoder": self.decoder()}),
            Phase("train", {**step, **made, "engine's model": asleep, **self.training()}),
        ]

    # What is always there --------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, float]:
        """Weights, gradients and optimizer of what trains, and all that is frozen with it."""
        sizes = self.sizes
        parts: dict[str, float] = {}
        lora = self.backend.get("lora")
        master = _BYTES[str(self.fsdp.get("master_dtype", "fp32"))]
        optimizer = self.backend.inner["optimizer"]
        # A scale of four bytes per block of 256 besides.
        moments = {"full": 2 * master, "8bit": 2 + 8 / 256, "bf16": 4}[optimizer.get("states")]
        if optimizer.get("offload"):
            moments = 0
        if lora is None:
            parts["trained weights"] = self._sharded(sizes.trained * master)
            parts["gradients and Adam"] = self._sharded(sizes.trained * (master + moments))
            parts["copies"] = self._sharded(sizes.trained * 4 * self.num_copies())
        else:
            # Codes of 4 bits, whole on every device, with a float32 scale per block of 64.
            parts["model"] = (
                sizes.trained * 0.5625 * GB if lora.get("base") else self._sharded(sizes.trained * self._dtype_bytes)
            )
            adapters = ADAPTED_LAYERS * sizes.blocks * sizes.experts * 2 * sizes.width * lora["rank"] / GB
            parts["LoRA with Adam"] = self._sharded(adapters * (2 * master + moments + 4 * self.num_copies()))
        if not self.is_sharding:
            parts["weights that compute"] = self.rounded()
        return {**parts, **self.frozen()}

    @property
    def is_sharding(self) -> bool:
        """True if FSDP gathers what computes."""
        return self.num_devices > 1 or bool(self.fsdp.get("cpu_offload"))

    def rounded(self) -> float:
        """Bytes of weights that one device keeps in another dtype than it computes with, adapters left out."""
        is_full = self.backend.get("lora") is None
        kept = _BYTES[str(self.fsdp.get("master_dtype", "fp32"))] if is_full else self._dtype_bytes
        return self.sizes.trained * self._compute_bytes * GB if kept != self._compute_bytes else 0.0

    def frozen(self) -> dict[str, float]:
        """What is whole on every device."""
        return {
            "text encoders": self.text_encoders(),
            "VAE": self.sizes.vae * _BYTES[self.bundle.get("vae_dtype", "fp32")] * GB,
            "other frozen models": self.sizes.beside * self._dtype_bytes * GB,
            "reward models": sum(scorer_bytes(part) for part in self.run.reward.inner.values()),
        }

    @property
    def _dtype_bytes(self) -> int:
        return _BYTES[self.bundle.get("dtype", "fp32")]

    def num_copies(self) -> int:
        """Float32 copies of the trained weights: an average, a reference, and one for the policy that samples."""
        is_kept = [self.backend.get("ema") is not None, bool(self.backend.get("keep_reference"))]
        return sum(is_kept) + ("DiffusionNFT" in self.algorithm.class_names)

    def text_encoders(self) -> float:
        """Whole on each device all the time; 0 where they compute on the CPU, rest there, or are dropped."""
        is_elsewhere = self.bundle.get("text_encoder_device") == "cpu" or self.bundle.get("rest_text_encoders")
        return 0.0 if is_elsewhere or self.run.engine.get("drop_text_encoders") else self._text_bytes()

    def _text_bytes(self) -> float:
        """Bytes of the text encoders, wherever they are."""
        dtype = self.bundle.get("text_encoder_dtype") or self.bundle.get("dtype", "fp32")
        return self.sizes.text * _BYTES[dtype] * GB

    def start(self) -> dict[str, float]:
        """What is there once the model is built. A backend that reads shards holds no more than them; of others, every
        device holds the model before it is sharded, its weights that train in float32."""
        dropped = self.run.engine.get("drop_text_encoders") and self.bundle.get("text_encoder_device") != "cpu"
        text = {"text encoders before they are dropped": self.sizes.text * 2 * GB if dropped else 0.0}
        is_quantised = bool((self.backend.get("lora") or {}).get("base"))
        if (
            self.backend.abilities.get("reads_weights")
            and not is_quantised
            and "defers_weights" in self.bundle.keywords
        ):
            return {**self.weights(), **text}
        dtype = self._dtype_bytes if self.backend.get("lora") is not None else 4
        whole = self.gathered() if self.bundle.get("decoder_device") == "cpu" else self.sizes.trained * dtype * GB
        return {**self.frozen(), **text, "whole model": whole}

    def engine_weights(self) -> float:
        """The copy of the model that an engine samples with, where it is on the devices that train."""
        group, engine = groups_of_run(self.run)[0], self.run.engine
        if self.run.stages[0].at not in group.holds or not engine.ability("has_own_weights"):
            return 0.0
        return self.sizes.trained * _BYTES[engine.get("dtype", "bf16")] * GB

    def gathered(self) -> float:
        """Two blocks, one of which is fetched while the other computes."""
        if not self.is_sharding:
            return 0.0
        return 2 * self.sizes.trained / self.sizes.experts / self.sizes.blocks * self._compute_bytes * GB

    @property
    def _compute_bytes(self) -> int:
        return _BYTES[str(self.fsdp.get("param_dtype", "fp32"))]

    def _sharded(self, billions_of_bytes: float) -> float:
        return billions_of_bytes * GB / self.num_shards

    # What a rollout holds --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of one row that a device computes with: its latents, the images next to them and its text."""
        frames = 1 + int((self.frames - 1) // self.sizes.frame_factor) if self.sizes.frame_factor else 1
        area = self.sizes.pixels_per_token**2
        pictures = self.bundle.get("image_area", 0) // area
        return -(-(self.pixels // area * frames + pictures + self.sizes.text_tokens) // self.num_sharing)

    def samples(self) -> dict[str, float]:
        """Media, conditions and trajectories of all samples of a device until they are trained on."""
        media_bytes = 1 if self.run.engine.get("media_bits") == 8 else 4
        decodes = self.run.engine.get("decode", True)
        conditions = self.sizes.text_tokens * self.sizes.text_width * self.num_branches
        # A latent has about a 12th of the numbers of its pixels (16 channels for 3 x 8 x 8), less in time.
        latents = 3 * self.pixels * max(1, self.frames // 4) / 12 * (self.num_steps() + 2)
        return {
            # Twice, while the chunks of a rollout are joined.
            "media": 2 * decodes * self.num_samples * 3 * self.pixels * self.frames * media_bytes,
            "conditions": self.num_samples * conditions * 4,
            "trajectories": self.num_samples * latents * 4,
        }

    def num_steps(self) -> int:
        """Steps of a sample that are trained on."""
        return trained_steps(self.algorithm, self.run.sampling)

    def rollout_activations(self) -> float:
        """Bytes of one forward without gradient."""
        rows = self.run.engine.get("forward_batch_size", 1) * self.num_branches
        return rows * self.tokens * self.sizes.width * self.sizes.held_per_token * self._compute_bytes

    def decoder(self) -> float:
        """Bytes of one call of the VAE."""
        if not self.run.engine.get("decode", True):
            return 0.0
        span = self.bundle.get("vae_tile_frames") or self.frames
        frames, short = min(span, self.frames), self.sizes.decode_short_kb
        if short is not None and frames <= 1 + self.sizes.frame_factor:
            return self._decoding(short)
        return self._decoding(self.sizes.decode_kb * (frames if self.sizes.decodes_at_once else 1))

    def _decoding(self, kilobytes: float) -> float:
        """A tile takes memory for its pixels; in addition the media are there, in parts and joined."""
        sampled = min(self.num_samples, self.run.engine.get("forward_batch_size") or self.num_samples)
        batch = min(self.run.policy.pipeline.get("decode_batch_size", 8), sampled)
        tile, media = self.bundle.get("vae_tile_pixels"), 3 * 3 * self.pixels * self.frames * 4
        pixels = self.pixels if tile is None else min(self.pixels, tile**2)
        return batch * (kilobytes * 1e3 * pixels + media)

    # What training holds ---------------------------------------------------------------------------------------------

    def training(self) -> dict[str, float]:
        """Activations that the backward pass needs, of the rows of one forward."""
        micro, has_reward = self.run.policy.stack.get("micro_batch_size", 1), self.has_reward_gradient
        rows = min(self.algorithm.get("rows_per_forward") or math.inf, micro * self.num_steps())
        # A sampler that is unrolled makes a forward per step, all of which wait for the backward.
        together = micro if has_reward and self.algorithm.ability("trained_rows") is None else rows
        tokens = self.tokens * self.sizes.reread
        row = self.sizes.width * self._compute_bytes * tokens * self.num_branches
        how, kept = self.fsdp.get("activation_checkpointing"), self.sizes.kept_per_token
        if self.fsdp.get("activation_offload") and not how and not self.algorithm.get("is_checkpointed"):
            return {"activations": self.sizes.most_offloaded * rows * row}
        num = 2 if self.fsdp.get("activation_offload") else self.sizes.blocks
        if how == "selective" and not self.algorithm.get("is_checkpointed"):
            parts = {"activations": (PRODUCTS * num * kept * rows + kept * together) * row}
        elif how or self.algorithm.get("is_checkpointed"):
            parts = {"activations": (num * rows + kept * together) * row}
        else:
            parts = {"activations": num * kept * rows * row}
        if has_reward:
            if self.sizes.decode_gradient_kb is None:
                raise ConfigError("what decoding with a gradient takes in this model's VAE is not counted.")
            samples = max(1, rows // self.num_steps())
            decoder = {"decoder with gradient": samples * self.sizes.decode_gradient_kb * 1e3 * self.pixels}
            if not self.algorithm.get("is_checkpointed"):
                return {**parts, **decoder}
            # Velocities are recomputed after the decoder's backward pass.
            return max(parts, decoder, key=lambda each: sum(each.values()))
        return parts

    @property
    def has_reward_gradient(self) -> bool:
        """True if the loss goes through the decoder."""
        return bool(self.algorithm.ability("requires_reward_gradient"))


def trained_steps(algorithm: Part, sampling: Part) -> int:
    """Steps of a sample that an algorithm trains on."""
    scheduler, rows = sampling.node.get("scheduler") or {}, algorithm.ability("trained_rows")
    chosen = algorithm.get(rows) if isinstance(rows, str) else rows
    if chosen is None and sampling.get("one_step") is not None:
        return 1
    return chosen or scheduler.get("num_sde_steps") or sampling.get("num_inference_steps")


def scorer_bytes(part: Part) -> float:
    """Bytes of a scorer and those inside it."""
    # A scorer's judge or detector has no base class that declares it.
    billions = part.ability("model_billions") if "model_billions" in part.abilities else 0.0
    own = billions * _BYTES[part.get("dtype") or "fp32"] * GB
    return own + sum(scorer_bytes(inner) for inner in part.inner.values())
