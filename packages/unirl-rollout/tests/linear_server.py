"""An engine process whose model is a velocity a x + b of two pushed numbers, to test pools with real processes that
start in seconds. `die_once` in its options: a file; the process that makes it is killed."""

import functools
import time
from pathlib import Path

import torch
from pushed_pair import PushedPair, die_where
from safetensors.torch import load_file, save_file

from unirl.rollout.engine.child.messages import EngineReady, MessageCodec
from unirl.rollout.engine.child.server import main
from unirl.rollout.engine.served_latents.call import (
    ECHOED_SIGMAS,
    LATENTS,
    LOG_PROBS,
    SampledLatents,
    SampleLatents,
)
from unirl.sde import loop
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import step_noise

CODEC = MessageCodec("Linear", EngineReady, SampleLatents, SampledLatents)


class LinearHost:
    """Samples with the last pushed numbers; before the first push, with those of the trainer's fake."""

    def __init__(self, start, aborts):
        torch.set_num_threads(1)
        self._options, self._scratch = start.engine_args, Path(start.scratch_dir)
        self._pair = PushedPair(0.5, 0.1, start.policy_version)
        self._num_calls = 0

    def ready(self):
        return EngineReady(version="1.0", torch_version=torch.__version__, dtype="torch.float32")

    def answer(self, message):
        return self._sampled(message) if isinstance(message, SampleLatents) else self._pair.answer(message)

    def _sampled(self, call):
        self._num_calls += 1
        time.sleep(self._options["seconds_per_call"])
        if "die_once" in self._options and self._num_calls > 1:
            die_where(functools.partial(Path(self._options["die_once"]).touch, exist_ok=False))
        a, b = self._pair.weights["a"], self._pair.weights["b"]
        found = loop.sample(
            lambda x, sigma, step: a * x + b,
            load_file(call.path)[LATENTS],
            torch.tensor(call.sigmas),
            strategy=FlowSDEStrategy(),
            eta=call.eta,
            sde_indices=call.sde_indices,
            step_noise=lambda step: step_noise(call.noise_keys, step, call.noise_seed, call.noise_shape),
            keep="all",
        )
        log_probs = torch.zeros(call.num_samples, len(call.sigmas) - 1)
        if found.sde_logp is not None:
            log_probs[:, call.sde_indices] = found.sde_logp
        path = self._scratch / f"answer-{self._num_calls}.safetensors"
        stored = {LATENTS: found.at(call.positions).contiguous(), LOG_PROBS: log_probs}
        save_file({**stored, ECHOED_SIGMAS: torch.tensor(call.sigmas)}, path)
        return SampledLatents(self._pair.policy_version, str(path))


if __name__ == "__main__":
    main(CODEC, LinearHost)
