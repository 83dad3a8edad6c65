"""Runs vLLM-Omni and answers this package's messages. Imported only by the interpreter that has vLLM-Omni."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unirl.rollout.engine.checkpoint import part_files, part_shapes
from unirl.rollout.engine.child.adapter import SentAdapter
from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.served_latents.call import SampledLatents, SampleLatents
from unirl.rollout.engine.served_latents.folder import CONFIG_FILE, INDEX_FILE, linked, pushed_files, served_class
from unirl.rollout.engine.served_latents.host import LatentsHost
from unirl.rollout.engine.served_latents.ranks import failures
from unirl.rollout.engine.vllm_omni.families import FAMILY, SERVED, Family, family_of
from unirl.rollout.engine.vllm_omni.messages import Ready
from unirl.rollout.engine.vllm_omni.transformers import NATIVE
from unirl.rollout.engine.written_for import VLLM_OMNI
from unirl.types.adapters import factor_pairs
from unirl.types.errors import ContractError, WeightSyncError
from unirl.types.shared_buckets import Place
from unirl.types.weights import WeightSpec

_PACKAGE = __name__.rpartition(".")[0]
_WARM_UP_TOKENS = 32
"""Latent tokens per side of BAGEL's warm-up image."""


class EngineHost(LatentsHost):
    """Owns vLLM-Omni and tracks its policy version. Raises ConfigError if vLLM-Omni is missing."""

    engine = "vLLM-Omni"

    def __init__(self, start: Start) -> None:
        self._omni = _VLLMOmni()
        options = dict(start.engine_args)
        family, folder = family_of(Path(start.model)), Path(start.model)
        if family.topology is not None:
            stages = Path(start.scratch_dir) / "stages.yaml"
            num_devices = options.pop("tensor_parallel_size", 1)
            stages.write_text(json.dumps(_one_stage(family.topology, num_devices, family.has_experts)))
            # HunyuanImage3's configuration class is in the folder of its weights.
            options |= {"deploy_config": str(stages), "trust_remote_code": True}
        self._engine: Any = self._omni.engine(
            model=str(_loadable(folder, Path(start.scratch_dir), family)),
            custom_pipeline_args={
                "pipeline_class": f"{_PACKAGE}.{family.worker}",
                FAMILY: served_class(folder, SERVED, "vLLM-Omni"),
            },
            worker_extension_cls=f"{_PACKAGE}.worker_ext.PushExtension",
            **options,
        )
        found = self._ask("unirl_describe")
        self._facts = found[0] | {"num_parameters": sum(each["num_parameters"] for each in found)}
        self._model = folder
        self._adapter: Any = None  # Any: vLLM-Omni's own
        self._num_adapters = 0
        self._family = family
        self._merged: set[str] | None = None
        """Tensors of the last merged adapter."""
        shapes = None if family.pushed is None else part_shapes(folder, family.pushed)
        super().__init__(start, self._facts["dtype"], shapes)

    def ready(self) -> Ready:
        """Facts about the engine for the trainer."""
        return Ready(version=self._omni.version, torch_version=torch.__version__, **self._facts)

    def denoise(self, call: SampleLatents) -> SampledLatents:
        """Sample all rows of a call in one batch."""
        path = self._next_answer()
        sampling = self._omni.sampling_params(
            height=call.height,
            width=call.width,
            num_inference_steps=len(call.sigmas) - 1,
            lora_request=self._adapter,
            extra_args={self._omni.given: {"call": dataclasses.asdict(call), "answer": str(path)}},
        )
        (output,) = self._engine.generate({"prompt": "given"}, sampling, use_tqdm=False)
        if not path.is_file():
            raise ContractError(f"vLLM-Omni wrote no answer: {output.error_message or output}")
        return SampledLatents(self._pushes.policy_version, str(path))

    def _load(self, paths: Sequence[str]) -> int:
        return sum(found["num_bound"] for found in self._ask("unirl_load_files", list(paths)))

    def _begin_push(self) -> None:
        super()._begin_push()
        self._ask("unirl_begin")

    def _take(self, place: Place, specs: Sequence[WeightSpec]) -> None:
        self._ask("unirl_take", place, [dataclasses.asdict(spec) for spec in specs])
        self._note_sent(specs)

    def _num_taken(self) -> int:
        return sum(found["num_bound"] for found in self._ask("unirl_taken"))

    def _checksums(self) -> Sequence[str]:
        return [found["checksum"] for found in self._ask("unirl_checksum")]

    def _act_with(self, adapter: SentAdapter) -> int:
        return self._merge(adapter) if self._family.merges_adapters else self._attach(adapter)

    def _merge(self, adapter: SentAdapter) -> int:
        """Replace the weights of the adapter's layers by merged ones, and prove that they took effect."""
        if self._merged not in (None, set(adapter.tensors)):
            raise WeightSyncError(
                "the adapter has other layers than the last one, whose changes would stay in the weights of the others"
            )
        self._merged = set(adapter.tensors)
        names = [f"{layer}.weight" for layer in factor_pairs(adapter.tensors)]
        base = {name: self._base_files[name] for name in names}
        found = self._ask("unirl_merge_adapter", str(adapter.folder), base, self._dtype)
        self._sent = {"merged": found[0]["merged"]}
        self._prove_effect()
        num_layers: int = found[0]["num_layers"]
        return num_layers

    @cached_property
    def _base_files(self) -> dict[str, tuple[str, str]]:
        """Name of a pushed tensor -> its file in the checkpoint, and its name there."""
        pushed = self._family.pushed
        return pushed_files(self._model) if pushed is None else part_files(self._model, pushed)

    @property
    def _dtype(self) -> str:
        """The engine's, as an attribute of torch."""
        return str(self._facts["dtype"]).removeprefix("torch.")

    def _attach(self, adapter: SentAdapter) -> int:
        self._num_adapters += 1
        number, last = self._num_adapters, self._adapter
        tensors = adapter.tensors
        own = self._renamed(adapter.folder, adapter.config, self._scratch / f"adapter-{number}")
        acting: list[int] = [found["num_layers"] for found in self._ask("unirl_load_adapter", str(own), number)]
        if any(2 * num_layers != len(tensors) for num_layers in acting):
            raise WeightSyncError(
                f"an adapter of {len(tensors) // 2} layers was sent, vLLM-Omni acts with {', '.join(map(str, acting))}"
            )
        self._adapter = self._omni.adapter_request(str(own), number)
        if last is not None:
            shutil.rmtree(last.lora_path)
        return acting[0]

    def _renamed(self, sent: Path, config: Mapping[str, Any], own: Path) -> Path:
        """A copy of the sent adapter under vLLM-Omni's names; other instances read the original."""
        native = NATIVE[served_class(self._model, NATIVE, self.engine)]
        name, weights = native.layer_name, "adapter_model.safetensors"
        own.mkdir()
        tensors = load_file(sent / weights)
        save_file({name(key).replace("/", "."): tensor for key, tensor in tensors.items()}, own / weights)
        renamed = {**config, "target_modules": [name(layers) for layers in config["target_modules"]]}
        (own / "adapter_config.json").write_text(json.dumps(renamed), encoding="utf-8")
        return own

    def _sleep(self, level: int) -> None:
        self._rpc("sleep", level)

    def _wake_up(self) -> None:
        self._rpc("wake_up")

    def _ask(self, method: str, *args: Any) -> list[dict[str, Any]]:  # Any: what PushExtension takes and says
        """Answers of all ranks. Raises WeightSyncError if one has `error`."""
        answer = self._rpc("unirl_on_all", method, list(args))
        if not isinstance(answer, list):
            raise WeightSyncError(f"vLLM-Omni could not do it: {answer}")
        if error := failures([found.get("error") for found in answer]):
            raise WeightSyncError(f"vLLM-Omni could not do it: {error}")
        return answer

    def _rpc(self, method: str, *args: Any) -> Any:  # Any: what the method gives
        """Call a method on all workers; returns the answer of the first."""
        (answers,) = self._engine.engine.collective_rpc(method, args=args, stage_ids=[0])
        return answers[0] if isinstance(answers, list) else answers


def _loadable(folder: Path, scratch: Path, family: Family) -> Path:
    """The folder itself, or one of links to its files of which one says something else: the configuration of a small
    BAGEL, which then allows the 512 x 512 image of vLLM-Omni's warm-up (the number of positions is read from the
    weights), or the index of a family that is loaded as another."""
    if family.loaded_as is not None:
        return linked(folder, scratch, INDEX_FILE, {"_class_name": family.loaded_as})
    file = folder / CONFIG_FILE
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if said.get("model_type") == "bagel" and said.get("max_latent_size", _WARM_UP_TOKENS) < _WARM_UP_TOKENS:
        return linked(folder, scratch, CONFIG_FILE, {"max_latent_size": _WARM_UP_TOKENS})
    return folder


def _one_stage(topology: str, num_devices: int, has_experts: bool) -> dict[str, Any]:  # Any: vLLM-Omni's own
    """A one-stage deployment of vLLM-Omni; those that it ships need other devices."""
    stage = {
        "stage_id": 0,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "devices": ",".join(map(str, range(num_devices))),
        "parallel_config": {
            "tensor_parallel_size": num_devices,
            "enable_expert_parallel": has_experts and num_devices > 1,
        },
    }
    return {"pipeline": topology, "async_chunk": False, "stages": [stage]}


class _VLLMOmni:
    """The parts of vLLM-Omni that are used, imported once. Raises ConfigError if it or one of the parts is missing."""

    def __init__(self) -> None:
        self.version: str = VLLM_OMNI.require().__version__
        self.engine: Any = importlib.import_module("vllm_omni.entrypoints.omni").Omni  # Any: an optional package
        self.sampling_params: Any = importlib.import_module("vllm_omni.inputs.data").OmniDiffusionSamplingParams
        self.given: str = importlib.import_module(f"{_PACKAGE}.sampling").GIVEN
        self.adapter_request: Any = importlib.import_module(f"{_PACKAGE}.worker_ext").adapter_request
