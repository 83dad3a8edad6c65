"""Pushes to a real engine through memory that holds one bucket after the other."""

import os
import signal

import pytest
import torch
from recipe_runs import SMALL_SHAPES, finish, records, train, untimed
from served_engines import SERVED, marked, nightly
from shapes_sd3 import CHECKPOINT, gap, request

from unirl.types.errors import WeightSyncError
from unirl.types.weights import WeightSpec, weight_buckets

pytestmark = [pytest.mark.slow]

TOLERANCE = 1e-4
"""As of test_served_latents."""
BUCKET_BYTES = 200_000
"""The weights are 12.7 MB, so projections of one attention come in different buckets."""


@pytest.fixture(params=[marked("vllm_omni")])
def sharing(request, shapes):
    """An engine that loads each bucket as it comes."""
    engine = SERVED[request.param].start(shapes, CHECKPOINT)
    engine.share_memory(torch.device("cpu"))
    yield engine
    engine.shutdown()


def push(engine, pipeline, version, change=None):
    """Push all weights. change: called with each bucket before it is sent."""
    tensors = pipeline.bundle.transformer.state_dict()
    engine.begin_weights(version, [WeightSpec(name, tuple(t.shape), str(t.dtype), "") for name, t in tensors.items()])
    for bucket in weight_buckets(tensors.items(), policy_version=version, max_bytes=BUCKET_BYTES):
        engine.receive_weights(bucket if change is None else change(bucket))
    return engine.finish_weights(version)


def damaged(bucket):
    """The bucket, of which one tensor is not what its checksum says."""
    changed = {name: tensor + 1 if name == "proj_out.bias" else tensor for name, tensor in bucket.tensors.items()}
    return bucket.with_tensors(changed)


def test_the_engine_is_the_new_policy_or_does_not_sample(sharing, other):
    assert gap(sharing, other) > 0.01
    receipt = push(sharing, other, 1)
    assert gap(sharing, other) < TOLERANCE
    assert receipt.num_bound == sharing.ready().num_parameters
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in other.bundle.transformer.state_dict().values())
    with pytest.raises(WeightSyncError, match="weights arrived changed: expected .*proj_out.bias"):
        push(sharing, other, 2, damaged)
    with pytest.raises(
        WeightSyncError, match="cannot generate: the push of version 2, loaded bucket by bucket, did not"
    ):
        sharing.generate(request(other))
    push(sharing, other, 2)
    assert gap(sharing, other) < TOLERANCE
    os.kill(sharing.pids[0], signal.SIGKILL)
    with pytest.raises(WeightSyncError, match="died and took the pushed policy with it: sync.transport: ipc"):
        sharing.generate(request(other))
    push(sharing, other, 3)
    assert gap(sharing, other) < TOLERANCE


@pytest.mark.parametrize("name", [nightly(marked("vllm_omni"))])
def test_a_run_learns_what_it_learns_from_files(name, tmp_path):
    served = SERVED[name]
    words = (served.recipe, f"engine.python={served.python}", *SMALL_SHAPES, "num_rollouts=2")
    runs = {}
    for transport in ("ipc", "null"):
        runs[transport] = tmp_path / transport
        own = (f"sync.transport={transport}", f"sync.bucket_bytes={BUCKET_BYTES}")
        finish(train(runs[transport], *words, *own), runs[transport])
    assert untimed(records(runs["ipc"])) == untimed(records(runs["null"]))
