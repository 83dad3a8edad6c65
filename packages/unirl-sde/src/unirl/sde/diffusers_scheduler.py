"""A drop-in diffusers scheduler whose steps are stochastic and have log-probabilities (extra `diffusers`).

    pipe.scheduler = FlowMatchSDEScheduler.from_config(pipe.scheduler.config, eta=0.7)
    images = pipe(prompt).images
    trajectory = pipe.scheduler.trajectory()

Timesteps, sigmas and dynamic shifting are those of diffusers' FlowMatchEulerDiscreteScheduler. Steps that are not
stochastic are its steps, so eta = 0 gives the same images. Shape letters: see `unirl.sde`.
"""

from typing import Any, Literal, cast

import torch
from torch import Generator, Tensor

from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlowSDEStrategy, SDEStrategy
from unirl.sde.likelihood import Reduction
from unirl.sde.loop import Trajectory
from unirl.sde.noise import step_noise

try:
    from diffusers.configuration_utils import register_to_config
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
        FlowMatchEulerDiscreteSchedulerOutput,
    )
    from diffusers.utils.torch_utils import randn_tensor
except ImportError as error:
    raise ImportError(
        "unirl.sde.diffusers_scheduler needs diffusers: install the extra, pip install 'unirl-sde[diffusers]'."
    ) from error

# A scheduler configuration is a JSON file, so it holds the kernel's name and not the kernel.
_KERNELS: dict[str, type[SDEStrategy]] = {
    kernel.name: kernel for kernel in (FlowSDEStrategy, DanceSDEStrategy, CPSSDEStrategy, DDIMStrategy)
}


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """FlowMatchEulerDiscreteScheduler with stochastic steps that record their log-probabilities.

    The settings up to `stochastic_sampling` are the parent's; `from_config` of a parent's configuration keeps them.
    eta: noise level of the stochastic steps; 0 turns them off and leaves exactly the parent.
    strategy, reduction: the kernel by name, and how it reduces the log-probability; see `unirl.sde.kernels`.
    sde_indices: the stochastic steps; None means all, but for the last where the kernel adds no noise there.
    noise_seed: base seed of keyed noise (`unirl.sde.noise.step_noise`), which then needs one key per sample, here as
    noise_keys or by `set_noise_keys`. None draws from the generator given to `step`, or from torch's global one; a
    stock pipeline passes none.
    Raises ValueError for values outside these.
    """

    sigmas: Tensor
    """[T + 1] float32; set by `set_timesteps`."""

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float | None = 0.5,
        max_shift: float | None = 1.15,
        base_image_seq_len: int = 256,
        max_image_seq_len: int = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: Literal["exponential", "linear"] = "exponential",
        stochastic_sampling: bool = False,
        eta: float = 0.7,
        strategy: Literal["flow", "dance", "cps", "ddim"] = "flow",
        reduction: Reduction = "mean",
        sde_indices: list[int] | None = None,
        noise_seed: int | None = None,
        noise_keys: list[str] | None = None,
    ) -> None:
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            shift=shift,
            use_dynamic_shifting=use_dynamic_shifting,
            base_shift=base_shift,
            max_shift=max_shift,
            base_image_seq_len=base_image_seq_len,
            max_image_seq_len=max_image_seq_len,
            invert_sigmas=invert_sigmas,
            shift_terminal=shift_terminal,
            use_karras_sigmas=use_karras_sigmas,
            use_exponential_sigmas=use_exponential_sigmas,
            use_beta_sigmas=use_beta_sigmas,
            time_shift_type=time_shift_type,
            stochastic_sampling=stochastic_sampling,
        )
        if strategy not in _KERNELS:
            raise ValueError(f"strategy = {strategy!r} is not one of {sorted(_KERNELS)}.")
        if stochastic_sampling or invert_sigmas:
            raise ValueError(
                f"stochastic_sampling = {stochastic_sampling} and invert_sigmas = {invert_sigmas} must both be off: "
                "their steps are not those of an SDE kernel."
            )
        if noise_keys is not None and noise_seed is None:
            raise ValueError(f"noise_keys = {noise_keys} have no effect without a noise_seed.")
        self._kernel = _KERNELS[strategy](reduction=reduction)
        self._kernel.check_eta(eta)
        self._eta = eta
        self._chosen_indices = sde_indices
        self._noise_seed = noise_seed
        self._noise_keys = noise_keys
        self._forget()

    def set_noise_keys(self, keys: list[str]) -> None:
        """One key per sample of the next pipeline call; raises ValueError if the scheduler has no noise_seed."""
        if self._noise_seed is None:
            raise ValueError("noise keys have no effect without a noise_seed: set it in the configuration.")
        self._noise_keys = list(keys)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """The parent's schedule; forgets the previous trajectory. Raises ValueError if a stochastic step is outside."""
        parent: Any = super()  # diffusers annotates `device` without the None that it accepts
        parent.set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        self._forget()
        num_steps = len(self.sigmas) - 1
        num_noisy = num_steps if self._kernel.takes_last_step else num_steps - 1
        chosen = range(num_noisy) if self._chosen_indices is None else self._chosen_indices
        if len(set(chosen)) != len(chosen) or any(not 0 <= index < num_steps for index in chosen):
            raise ValueError(f"sde_indices = {list(chosen)} must be distinct and within 0 .. {num_steps - 1}.")
        if self._eta > 0 and any(index >= num_noisy for index in chosen):
            raise ValueError(
                f"sde_indices = {list(chosen)}: the {self._kernel.name} kernel adds no noise on the last step, which "
                f"then has no log-probability. Leave {num_steps - 1} out."
            )
        self._sde_indices = frozenset(chosen if self._eta > 0 else ())
        self._levels = self.sigmas.tolist()

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: Generator | None = None,
        per_token_timesteps: Tensor | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor]:
        """The next latent, [B, ...] in the dtype of `model_output`, as the parent returns it.

        model_output: the velocity after guidance, [B, ...]. sample: the latent, [B, ...]. A stochastic step adds its
        log-probability to `log_probs` and both of its latents to `trajectory()`; arithmetic is float32, and the
        log-probability is that of the returned, rounded latent. s_churn to s_noise have no effect, as in the parent.
        Raises ValueError for per-token timesteps at a stochastic step, and for missing or miscounted noise keys.
        """
        parent: Any = super()  # diffusers annotates FloatTensor, which no tensor is an instance of
        if not self._levels:
            raise ValueError("step was called before set_timesteps: the scheduler has no schedule.")
        if self.step_index is None:
            parent._init_step_index(timestep)
        index: int = parent.step_index
        if index not in self._sde_indices:
            stepped = parent.step(
                model_output,
                timestep,
                sample,
                generator=generator,
                per_token_timesteps=per_token_timesteps,
                return_dict=False,
            )[0]
        else:
            if per_token_timesteps is not None:
                raise ValueError(f"step {index} is stochastic, and per-token timesteps have no SDE kernel here.")
            stepped = self._stochastic_step(model_output, sample, index, generator)
            self._step_index = index + 1
        if index + 2 == len(self.sigmas):
            self._latents[index + 1] = stepped
        if not return_dict:
            return (stepped,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=cast(Any, stepped))  # FloatTensor, as above

    @property
    def log_probs(self) -> list[Tensor]:
        """[B] float32 for every stochastic step taken since `set_timesteps`, in order."""
        return list(self._log_probs)

    def trajectory(self) -> Trajectory:
        """The stochastic transitions of the last pipeline call and its final latent, as `unirl.sde.sample` returns.

        Positions count from 0 at sigmas[0]; `replay` needs eta, the kernel and sigma_max = sigmas[1].
        Raises ValueError before the schedule has been walked to its end.
        """
        last = len(self.sigmas) - 1
        if last not in self._latents:
            raise ValueError(f"the trajectory is not complete: step_index = {self.step_index} of {last} steps.")
        positions = sorted(self._latents)
        return Trajectory(
            latents=torch.stack([self._latents[position] for position in positions], dim=1),
            indices=positions,
            sde_indices=list(self._taken),
            sde_logp=torch.stack(self._log_probs, dim=1) if self._log_probs else None,
            sde_means=None,
        )

    def _forget(self) -> None:
        self._sde_indices: frozenset[int] = frozenset()
        self._levels: list[float] = []
        self._latents: dict[int, Tensor] = {}
        self._taken: list[int] = []
        self._log_probs: list[Tensor] = []

    def _stochastic_step(self, model_output: Tensor, sample: Tensor, index: int, generator: Generator | None) -> Tensor:
        rows = (sample.shape[0],)
        out = self._kernel.step(
            sample,
            model_output,
            torch.full(rows, self._levels[index], dtype=torch.float32, device=sample.device),
            torch.full(rows, self._levels[index + 1], dtype=torch.float32, device=sample.device),
            eta=self._eta,
            sigma_max=self._levels[1],
            noise=self._noise(sample, index, generator),
            storage_dtype=model_output.dtype,
        )
        if out.logp_R is None:
            raise ValueError(f"{self._kernel} gave no log-probability at eta = {self._eta}.")
        following = out.next.to(model_output.dtype)
        self._latents.update({index: sample, index + 1: following})
        self._taken.append(index)
        self._log_probs.append(out.logp_R)
        return following

    def _noise(self, sample: Tensor, index: int, generator: Generator | None) -> Tensor:
        if self._noise_seed is None:
            return randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=torch.float32)
        if self._noise_keys is None or len(self._noise_keys) != sample.shape[0]:
            raise ValueError(
                f"noise_seed = {self._noise_seed} needs one key per sample: got noise_keys = {self._noise_keys} for a "
                f"batch of {sample.shape[0]}. Call set_noise_keys before the pipeline."
            )
        return step_noise(self._noise_keys, index, self._noise_seed, sample.shape[1:]).to(sample.device)
