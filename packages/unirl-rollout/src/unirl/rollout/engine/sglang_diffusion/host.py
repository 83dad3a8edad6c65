"""Runs SGLang Diffusion and answers this package's messages. Imported only by the interpreter that has SGLang."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.rollout.engine.child.adapter import SentAdapter
from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.ports import free_port
from unirl.rollout.engine.served_latents.call import (
    ECHOED_SIGMAS,
    LATENTS,
    LOG_PROBS,
    SampledLatents,
    SampleLatents,
)
from unirl.rollout.engine.served_latents.folder import INDEX_FILE, TRANSFORMER, boundary_of, linked, transformers
from unirl.rollout.engine.served_latents.host import LatentsHost
from unirl.rollout.engine.sglang_diffusion.families import family_of
from unirl.rollout.engine.sglang_diffusion.messages import Ready
from unirl.rollout.engine.sglang_diffusion.worker_ext import CHECKSUM, DESCRIBE, GIVEN, IMAGE_LATENT
from unirl.rollout.engine.written_for import SGLANG_DIFFUSION
from unirl.types.errors import ConfigError, ContractError, WeightSyncError

_NO_DENSITY = {"sde": False, "cps": True, "ode": True}
"""SGLang's kernels -> True if their log-prob omits the Gaussian's constants."""
_MERGED = re.compile(r"Updated (\d+) LoRA layers .*skipped (\d+) unknown")
_WATCH_S = 0.5
_LEVELS = 1000.0
"""SGLang counts noise levels in thousandths."""


class EngineHost(LatentsHost):
    """Owns SGLang's generator and tracks its policy version. Raises ConfigError if SGLang is missing or would not use
    its native backend."""

    engine = "SGLang"

    def __init__(self, start: Start) -> None:
        self._sgl = _SGLang()
        self._folder = Path(start.model)
        self._transformers, self._boundary = transformers(self._folder), boundary_of(self._folder)
        options = dict(start.engine_args)
        # Engines that start at the same time on one host would all find SGLang's default ports free.
        ports = {"scheduler_port": free_port(), "master_port": free_port()}
        self._family = family_of(self._folder)
        loaded, loaded_as = self._folder, self._family.loaded_as
        if loaded_as is not None:
            loaded = linked(self._folder, Path(start.scratch_dir), INDEX_FILE, {"_class_name": loaded_as})
        self._generator = self._sgl.generator.from_pretrained(
            model_path=str(loaded), backend="sglang", **(ports | options)
        )
        threading.Thread(target=_end_with, args=(self._generator.local_scheduler_process,), daemon=True).start()
        self._facts: dict[str, Any] = json.loads(self._facts_of(DESCRIBE))  # Any: JSON
        for what in ("pipeline", TRANSFORMER):
            if not self._facts[what].startswith("sglang.") or "diffusers" in self._facts[what]:
                raise ConfigError(
                    f"SGLang fell back to {self._facts[what]} for the {what} of {start.model}, which gives no "
                    "trajectories. Use a checkpoint of a family that it runs natively, or the replica engine."
                )
        self._is_adapter_proved = False
        """True once an adapter has changed the checksum of the weights."""
        super().__init__(start, self._facts["dtype"])

    def ready(self) -> Ready:
        """Facts about the engine for the trainer."""
        return Ready(version=self._sgl.version, torch_version=torch.__version__, **self._facts)

    def denoise(self, call: SampleLatents) -> SampledLatents:
        """Sample all rows of a call in one batch."""
        kernel = call.kernel if call.eta > 0 and call.sde_indices else "ode"
        sampling = self._sgl.sampling_params.from_user_sampling_params_args(
            self._generator.server_args.model_path,
            server_args=self._generator.server_args,
            prompt="given",
            negative_prompt="given",
            height=call.height,
            width=call.width,
            num_frames=call.num_frames,
            num_inference_steps=len(call.sigmas) - 1,
            guidance_scale=call.guidance_scale,
            **self._second_guidance(call),
            cfg_normalization=0.0,
            seed=0,
            generator_device="cpu",
            save_output=False,
            rollout=True,
            rollout_sde_type=kernel,
            rollout_noise_level=call.eta,
            rollout_log_prob_no_const=_NO_DENSITY[kernel],
            rollout_sde_step_indices=call.sde_indices if kernel != "ode" else None,
            rollout_return_step_indices=call.positions,
            rollout_return_dit_trajectory=True,
        )
        request = self._sgl.prepare_request(server_args=self._generator.server_args, sampling_params=sampling)
        request.prompt = ["given"] * call.num_samples
        tensors = load_file(call.path)
        request.latents = tensors.pop(LATENTS)
        for name, tensor in sorted(tensors.items()):  # the second tensor of a field after the first
            field = name.partition(".")[0]
            value = tensor.tolist() if field.endswith("seq_lens") else tensor
            if field == IMAGE_LATENT:  # a tensor, where the other fields are lists of them
                request.image_latent = value
            else:
                setattr(request, field, [value] if field == name else [*getattr(request, field), value])
        request.scheduler = self._scheduler(call.sigmas)
        request.timesteps = request.scheduler.timesteps
        request.extra[GIVEN] = {
            "noise_keys": call.noise_keys,
            "noise_seed": call.noise_seed,
            "noise_shape": call.noise_shape,
            **call.layout,
        }
        data = self._forward([request]).rollout_trajectory_data
        data = data[0] if isinstance(data, list) else data
        if data is None or data.dit_trajectory is None or data.rollout_log_probs is None:
            raise ContractError("SGLang returned no trajectory; its native backend did not run")
        path = self._next_answer()
        stored = {
            LATENTS: data.dit_trajectory.latents,
            LOG_PROBS: data.rollout_log_probs,
            ECHOED_SIGMAS: data.dit_trajectory.sigmas,
        }
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path)
        return SampledLatents(self._pushes.policy_version, str(path))

    def _second_guidance(self, call: SampleLatents) -> dict[str, float]:
        """Guidance scale of the second expert. Raises ContractError for a level that SGLang gives to another expert."""
        if self._boundary is None:
            return {}
        for sigma in call.sigmas[:-1]:
            if (int(_LEVELS * sigma) >= _LEVELS * self._boundary) != (sigma >= self._boundary):
                raise ContractError(
                    f"the noise level {sigma} is above the boundary {self._boundary} of {self._folder.name}, and "
                    "SGLang, which cuts levels to thousandths, would give it to the second expert. Change the number "
                    "of steps."
                )
        return {"guidance_scale_2": call.scale_of_second}

    def _scheduler(self, sigmas: list[float]) -> Any:  # Any: SGLang's own
        """A scheduler that uses these sigmas verbatim; SGLang's own would shift them again."""
        scheduler = self._sgl.scheduler(shift=1.0)
        scheduler.set_timesteps(len(sigmas) - 1)
        scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float32)
        scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
        return scheduler

    # Weights ----------------------------------------------------------------------------------------------------

    def _load(self, paths: Sequence[str]) -> int:
        folder = self._scratch / "push"
        shutil.rmtree(folder, ignore_errors=True)
        for component in (".", *self._transformers):
            (folder / component).mkdir(parents=True)
            for entry in (self._folder / component).glob("*.json"):
                if not entry.name.endswith(".index.json"):
                    shutil.copy(entry, folder / component / entry.name)
        for component in self._transformers:  # every file holds tensors of all, see `worker_ext.own_tensors`
            for number, path in enumerate(paths):
                os.link(path, folder / component / f"diffusion_pytorch_model-{number:05d}.safetensors")
        self._must(
            self._sgl.structs.UpdateWeightFromDiskReqInput(
                model_path=str(folder), target_modules=list(self._transformers)
            )
        )
        # The folder is kept: SGLang loads it again if a later load fails.
        return self._facts["num_parameters"]

    def _checksums(self) -> Sequence[str]:
        return self._facts_of(CHECKSUM).split()

    def _act_with(self, adapter: SentAdapter) -> int:
        """Merge an adapter into the initial weights of the engine."""
        config = adapter.config
        tensors = self._family.completed(adapter.tensors, self._shapes)
        acts = any(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name)
        proves = acts and not self._is_adapter_proved
        before = self._checksums() if proves else []
        said = ""
        for component, own in self._by_component(tensors).items():
            said = self._must(
                self._tensor_request(
                    component,
                    own,
                    weight_update_mode="lora_merge",
                    lora_alpha=config["lora_alpha"],
                    lora_rank=config["r"],
                )
            )
            counted = _MERGED.match(said)
            if counted is None or (2 * int(counted[1]), int(counted[2])) != (len(own), 0):
                raise WeightSyncError(f"an adapter of {len(own) // 2} layers was sent, SGLang says: {said}")
        if any(old == new for old, new in zip(before, self._checksums() if proves else [], strict=True)):
            raise WeightSyncError(f"the adapter changed none of SGLang's weights on a rank, although it says: {said}")
        self._is_adapter_proved |= acts
        return len(adapter.tensors) // 2

    def _by_component(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The tensors of each transformer under its own names."""
        if len(self._transformers) == 1:
            return {TRANSFORMER: dict(tensors)}
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            component, _, own = name.partition("/")
            found.setdefault(component, {})[own] = tensor
        return found

    # Any, below: SGLang's own.
    def _tensor_request(self, component: str, tensors: Mapping[str, Tensor], **options: Any) -> Any:
        payload = self._sgl.serialize({component: list(tensors.items())}, output_str=True)
        return self._sgl.structs.UpdateWeightFromTensorReqInput(
            serialized_named_tensors=[payload], target_modules=[component], **options
        )

    def _facts_of(self, module: str) -> str:
        """Result of `describe` for a module."""
        return self._forward(self._sgl.structs.GetWeightsChecksumReqInput(module_names=[module])).output[module]

    def _must(self, request: Any) -> str:  # Any: SGLang's own
        """Send a request whose answer has a `success` flag; returns its message. Raises WeightSyncError if the flag is
        not true."""
        answer = self._sgl.client.forward(request)
        output = answer.output or {}
        if answer.error or output.get("success") is not True:
            raise WeightSyncError(f"SGLang did not take the weights: {answer.error or output}")
        return str(output.get("message", ""))

    def _sleep(self, level: int) -> None:
        del level
        self._occupation(self._sgl.structs.ReleaseMemoryOccupationReqInput())

    def _wake_up(self) -> None:
        self._occupation(self._sgl.structs.ResumeMemoryOccupationReqInput())

    def _occupation(self, request: Any) -> None:  # Any: SGLang's own
        answer = self._sgl.client.forward(request)
        if answer.error or not (answer.output or {}).get("success"):
            raise ConfigError(f"SGLang's {type(request).__name__} did not succeed: {answer.error or answer.output}")

    def _forward(self, request: Any) -> Any:  # Any: SGLang's own
        answer = self._sgl.client.forward(request)
        if answer.error:
            raise ContractError(f"SGLang could not do it: {answer.error}")
        return answer


class _SGLang:
    """The parts of SGLang that are used, imported once. Raises ConfigError if SGLang or one of the parts is missing."""

    def __init__(self) -> None:
        root = "sglang.multimodal_gen"
        runtime = f"{root}.runtime"
        self.version: str = SGLANG_DIFFUSION.require().__version__
        self.generator: Any = importlib.import_module(root).DiffGenerator  # Any, here and below: an optional package
        self.client: Any = importlib.import_module(f"{runtime}.scheduler_client").sync_scheduler_client
        self.prepare_request: Any = importlib.import_module(f"{runtime}.entrypoints.utils").prepare_request
        self.sampling_params: Any = importlib.import_module(f"{root}.configs.sample.sampling_params").SamplingParams
        self.structs: Any = importlib.import_module(f"{runtime}.entrypoints.post_training.io_struct")
        self.serialize: Any = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer.serialize
        self.scheduler: Any = importlib.import_module(
            f"{runtime}.models.schedulers.scheduling_flow_match_euler_discrete"
        ).FlowMatchEulerDiscreteScheduler


def _end_with(processes: list[Any]) -> None:  # Any: multiprocessing's own
    """End this process when one of SGLang's does: a call to a dead scheduler would wait forever."""
    while True:
        dead = [process for process in processes if not process.is_alive()]
        if dead:
            names = ", ".join(f"{process.name} (pid {process.pid}, exit code {process.exitcode})" for process in dead)
            sys.stderr.write(f"SGLang's {names} is dead\n")
            os._exit(1)
        time.sleep(_WATCH_S)
