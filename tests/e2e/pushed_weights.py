"""Both ends of a push, small and real: a backend that trains, engines with a copy of its model, and roles of engines in
threads. A separate module, so that worker processes can import it."""

from __future__ import annotations

import concurrent.futures
import io
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from unirl.distributed.tensor.transport import outgoing
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.weight_sync.transports.base import Parcel
from unirl.rollout.engine.replica.base import PushedWeights
from unirl.rollout.engine.replica.weights import ReplicaWeights
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types.conditions import PromptCondition
from unirl.types.errors import WorkerError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment
from unirl.types.weights import tensor_checksum

WIDTH = 8


class Block(nn.Module):
    """Stands for a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.to_q(x))


class Model(nn.Module):
    """Stands for what trains: an embedding, and blocks that adapters go to."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 3) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return x


class Bundle:
    """Stands for a model bundle of one or two components."""

    block_class_names = ("Block",)
    lora_target_modules = ("to_q",)

    def __init__(self, seed: int, num_components: int = 1, width: int = WIDTH, num_blocks: int = 3) -> None:
        torch.manual_seed(seed)
        names = ["transformer", "transformer_2"][:num_components]
        self.models = {name: Model(width, num_blocks) for name in names}

    def trainable_modules(self) -> dict[str, nn.Module]:
        return dict(self.models)


@torch.no_grad()
def log_prob(models: Mapping[str, nn.Module]) -> float:
    """What every sample's log-prob is: something that each weight has a part in."""
    bias = next(iter(models.values())).get_parameter("proj_in.bias")
    x = torch.linspace(-1, 1, len(bias), device=bias.device).expand(1, len(bias))
    return sum(float(model(x).mean()) for model in models.values())


class ForwardPipeline:
    """Stands for a language model whose log-probs are `log_prob` of the modules that train."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def encode(self, primitives, params):
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([1]) for _ in primitives["text"].texts])}

    def evaluating(self):
        return nullcontext()

    def replay(self, conditions, segment, params):
        return SimpleNamespace(logp_N=torch.full((segment.tokens.numel(),), log_prob(self._bundle.models)))


class CopyEngine(PushedWeights):
    """An engine with a copy of the model, which takes pushes as the replica does; its samples are canned."""

    def __init__(self, seed: int = 9, num_components: int = 1, device: str = "cpu") -> None:
        self.models: dict[str, nn.Module] = dict(Bundle(seed, num_components).models)
        self._weights = ReplicaWeights(self.models, torch.float32, torch.device(device), 0)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def generate(self, req, policy=None):
        self._weights.pushes.require(policy)
        num = req.batch_size
        value = torch.full((3,), log_prob(self.models))
        segment = TextSegment.pack(tokens=[torch.zeros(3, dtype=torch.long)] * num, log_probs=[value] * num)
        track = req.make_root_track(conditions={}, segment=segment, decoded=None)
        return RolloutResp(tracks={"text": track.replace(policy_versions=torch.full((num,), self.policy_version))})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def checksums(self) -> dict[str, str]:
        """Checksums of its weights."""
        return {name: tensor_checksum(tensor) for name, tensor in self._weights._tensors().items()}


def make_sync(training: tuple[Any, FSDPBackend], transport: str, *, kind: Any = FullWeightSync, **options: Any) -> Any:
    """A sync of what `make_training` made, with no engine yet. kind: its class. options: its other keywords."""
    bundle, backend = training
    pipeline: Any = ForwardPipeline(bundle)
    sampling = ARSamplingParams(temperature=1.0)
    return kind(backend, None, pipeline, sampling=sampling, dtype="fp32", transport=transport, **options)


def build_copy(context) -> dict[str, object]:
    """A worker with a small engine alone."""
    return {"engine": CopyEngine(device=context.device)}


def build_training(transport: str, context) -> dict[str, object]:
    """A worker that trains and pushes."""
    training = make_training(device=context.device)
    sync = make_sync(training, transport, canary_tolerance=1e-5, bucket_bytes=400)
    return {"sync": sync, "trainee": Trainee(training[1])}


class Trainee:
    """What a test asks of the worker that trains."""

    def __init__(self, backend: FSDPBackend) -> None:
        self.backend = backend

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def train(self) -> dict[str, str]:
        """One step; checksums of the weights then."""
        train(self.backend)
        return {name: tensor_checksum(tensor) for name, tensor in self.backend.weight_source.weights()}


class EnginesInThreads:
    """Stands for a RemoteRole: every engine answers in its own thread, one call at a time, and what it is called
    with crosses as bytes."""

    def __init__(self, *engines: CopyEngine, timeout_s: float = 120.0, timeouts_s: Mapping[str, float] = {}) -> None:  # noqa: B006
        self.engines = engines
        self.workers = tuple(f"rollout-{number}" for number in range(len(engines)))
        self.timeout_s = timeout_s
        """Limit for a method that `timeouts_s` does not name, and of the transport."""
        self.timeouts_s = timeouts_s
        self.num_bytes = 0
        """Bytes of tensors in the buckets that were opened, of the first engine."""
        self.spoil: Callable[[int, Any], Any] = lambda number, value: value
        """Changes what engine `number` is called with."""
        self._kept: list[dict[str, Any]] = [{} for _ in engines]
        self._threads = [ThreadPoolExecutor(1) for _ in engines]

    def wait_until_idle(self) -> None:
        """Return when every engine has ended the calls to it."""
        concurrent.futures.wait([thread.submit(int) for thread in self._threads])

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.submit(method, *args)()

    def submit(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        data = pickle.dumps(outgoing(list(args)))
        futures = [thread.submit(self._answer, number, method, data) for number, thread in enumerate(self._threads)]

        def wait() -> list[Any]:
            timeout_s = self.timeouts_s.get(method, self.timeout_s)
            done, late = concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises what the engine raised
            if late:
                names = [name for name, future in zip(self.workers, futures, strict=True) if future in late]
                raise WorkerError(", ".join(names), f"no answer to {method} within {timeout_s} s")
            return [future.result() for future in futures]

        return wait

    def _answer(self, number: int, method: str, data: bytes) -> Any:
        args = [self.spoil(number, value) for value in pickle.load(io.BytesIO(data))]
        opened = [value.opened(self._kept[number]) if isinstance(value, Parcel) else value for value in args]
        self.num_bytes += sum(value.num_bytes for value in opened if number == 0 and hasattr(value, "tensors"))
        return getattr(self.engines[number], method)(*opened)


def make_training(seed: int = 1, num_components: int = 1, width: int = WIDTH, num_blocks: int = 3, **options: Any):
    """A bundle and the backend that trains it; adapters act."""
    bundle = Bundle(seed, num_components, width, num_blocks)
    backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2), **options)  # ty: ignore
    with torch.no_grad():
        for name, parameter in backend.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.25)
    return bundle, backend


def train(backend: FSDPBackend) -> None:
    """One step of the optimizer."""
    for parameter in backend.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    backend.optimizer_step(1.0)


def nudge(backend: FSDPBackend, one_of: int = 5) -> None:
    """A step of the optimizer that changes some elements of each tensor alone: one of so many."""
    before = [parameter.detach().clone() for parameter in backend.parameters.values()]
    train(backend)
    with torch.no_grad():
        for parameter, old in zip(backend.parameters.values(), before, strict=True):
            changes = torch.arange(parameter.numel()).view(parameter.shape) % one_of == 0
            parameter.copy_(torch.where(changes, parameter, old))
