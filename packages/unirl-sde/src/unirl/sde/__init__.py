"""Stochastic samplers with exact log-probabilities for flow-matching and variance-preserving models.

Everything here takes tensors, numbers and a callable `velocity(x, sigma, step)`; nothing takes a configuration object,
reads the environment or knows what a model is. `kernels` holds one stochastic step, `loop` walks a schedule with it
and replays stored transitions, `schedule` makes sigmas, `noise` makes seeded Gaussian noise, `windows` chooses which
steps are stochastic, `solvers` are the deterministic steps, `likelihood` the log-probability and the KL,
`forward` the noising process. `variance_preserving` and `timesteps` bring models of DDPM and DDIM (SDXL, CogVideoX)
into the same coordinates. `diffusers_scheduler` (extra `diffusers`) puts the same step into a stock pipeline.

Conventions. sigma falls from 1 (noise) to 0 (data); x_sigma = (1 - sigma) x0 + sigma eps; a model predicts the velocity
v = eps - x0; dt = sigma_next - sigma < 0. Shape letters, used as suffixes in every module:

    R  rows of one batched call, each with its own sigma and step (R = B while sampling)
    B  samples
    S  stochastic steps of a trajectory
    T  steps of a schedule, which has T + 1 sigmas
    K  stored positions of a trajectory
    N  latent elements per sample
    ...  the latent shape, for example C H W or C F H W
"""

from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlowSDEStrategy, StepOut, Transition
from unirl.sde.loop import Replay, Trajectory, replay, sample, transition_rows
from unirl.sde.noise import initial_noise, step_noise
from unirl.sde.schedule import SigmaSchedule
from unirl.sde.timesteps import TimestepSchedule

__all__ = [
    "CPSSDEStrategy",
    "DDIMStrategy",
    "DanceSDEStrategy",
    "FlowSDEStrategy",
    "Replay",
    "SigmaSchedule",
    "StepOut",
    "TimestepSchedule",
    "Trajectory",
    "Transition",
    "initial_noise",
    "replay",
    "sample",
    "step_noise",
    "transition_rows",
]
