"""Both ends of a push, with nothing heavy between them. A separate module, so that worker processes can import it."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from unirl.types.conditions import PromptCondition
from unirl.types.errors import WeightSyncError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp
from unirl.types.segments import TextSegment
from unirl.types.weights import WeightReceipt, diff_specs, tensor_checksum


class OneWeightPipeline:
    """Stands for a language model whose every log-prob is one weight of the backend, taken by `read`."""

    def __init__(self, read):
        self.read = read
        self.num_replays = 0

    def encode(self, primitives, params):
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([1]) for _ in primitives["text"].texts])}

    def evaluating(self):
        return nullcontext()

    def replay(self, conditions, segment, params):
        self.num_replays += 1
        return SimpleNamespace(logp_N=torch.full((segment.tokens.numel(),), self.read()))


def first_weight(tensors) -> float:
    return float(next(iter(tensors.values())).flatten()[0])


def nothing(tensors) -> float:
    return 0.0


class RememberingEngine:
    """Stands for an engine: keeps what is pushed and answers with log-probs that `read` finds in it."""

    def __init__(self, expected=None, read=nothing):
        self.expected = expected
        self.read = read
        self.policy_version = -1
        self.bucket_device = torch.device("cpu")
        self.sizes = []
        self.pushed: dict[str, torch.Tensor] = {}
        self.num_tensors_off = 0

    def wait_until_ready(self):
        self.is_ready = True

    def begin_weights(self, policy_version, specs):
        if policy_version < self.policy_version:
            raise WeightSyncError(f"version {policy_version} is older than the engine's {self.policy_version}")
        wrong = [] if self.expected is None else diff_specs(specs, self.expected)
        if wrong:
            raise WeightSyncError("\n".join(wrong))
        self.announced, self.sizes, self.pushed = specs, [], {}

    def receive_weights(self, bucket):
        bucket.verify()
        self.sizes.append(bucket.num_bytes)
        self.pushed.update({name: tensor.clone() for name, tensor in bucket.tensors.items()})

    def finish_weights(self, policy_version, policy=None):
        self.policy = policy
        self.policy_version = policy_version
        return WeightReceipt(policy_version, len(self.pushed) + self.num_tensors_off, sum(self.sizes), 1)

    def load_adapter(self, bucket, config, policy=None):
        self.policy = policy
        self.begin_weights(bucket.policy_version, bucket.specs)
        self.receive_weights(bucket)
        self.config, self.policy_version = config, bucket.policy_version
        return WeightReceipt(bucket.policy_version, len(bucket.tensors), bucket.num_bytes, len(bucket.tensors) // 2)

    def generate(self, req, policy=None):
        num = req.batch_size
        value = self.read(self.pushed)
        segment = TextSegment.pack(
            tokens=[torch.zeros(3, dtype=torch.long)] * num, log_probs=[torch.full((3,), value)] * num
        )
        track = req.make_root_track(conditions={}, segment=segment, decoded=None)
        return RolloutResp(tracks={"text": track.replace(policy_versions=torch.full((num,), self.policy_version))})


class Probe:
    """What a test asks of an engine's worker."""

    def __init__(self, engine):
        self.engine = engine

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def pid(self):
        return os.getpid()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def checksums(self):
        """Checksums of what was pushed."""
        return {name: tensor_checksum(tensor) for name, tensor in self.engine.pushed.items()}


def build_engine(context):
    """A worker with an engine alone."""
    engine = RememberingEngine(read=first_weight)
    return {"engine": engine, "probe": Probe(engine)}
