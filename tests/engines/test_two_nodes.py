"""One instance of the real SGLang over two nodes, started by hand: its samples and pushes are those of one process.

The nodes are two servers of this host that know each other by an address alone.
"""

import contextlib
import os
import signal
import subprocess
import time
import urllib.request

import pytest
from letters_model import CONTEXT, TOLERANCE, LetterCodec, gap, save_qwen3
from served_engines import engine_python
from test_vllm_weights import full_sync, push, state

from unirl.rollout.engine.ports import free_port
from unirl.rollout.engine.sglang_llm.engine import _ON_A_CPU, SGLangRolloutEngine, _cpu_variables, _flags
from unirl.types.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A random Qwen3, and its folder."""
    folder = tmp_path_factory.mktemp("first")
    return save_qwen3(folder), str(folder)


@pytest.fixture(scope="module")
def url(first, tmp_path_factory):
    """Address of the first of two nodes, which hold half of the model each."""
    python, logs = engine_python("sglang-cpu"), tmp_path_factory.mktemp("logs")
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **_cpu_variables(1, 2)}
    meeting = f"127.0.0.1:{free_port()}"
    nodes: list[subprocess.Popen[bytes]] = []
    ports = [free_port(), free_port()]
    for rank, port in enumerate(ports):
        options: dict[str, str | int | float | bool] = {
            "model-path": first[1],
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "context-length": CONTEXT,
            "skip-tokenizer-init": True,
            "tp-size": 2,
            "nnodes": 2,
            "node-rank": rank,
            "dist-init-addr": meeting,
            "max-total-tokens": 16 * CONTEXT,
            **_ON_A_CPU,
        }
        with (logs / f"node-{rank}").open("wb") as log:
            command = [python, "-m", "sglang.launch_server", *_flags(options)]
            nodes.append(
                subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )
    try:
        found = f"http://127.0.0.1:{ports[0]}"
        while not answers(f"{found}/health"):
            dead = [rank for rank, node in enumerate(nodes) if node.poll() is not None]
            assert not dead, (logs / f"node-{dead[0]}").read_text()[-4000:]
            time.sleep(1)
        yield found
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def answers(address):
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=30):
        return True
    return False


def engine_at(url, first, transfer_dir):
    return SGLangRolloutEngine(LetterCodec(), model=first[1], url=url, dtype="fp32", transfer_dir=str(transfer_dir))


@pytest.mark.nightly
def test_two_nodes_take_pushes_and_give_log_probs_as_one(url, first, tmp_path):
    engine = engine_at(url, first, tmp_path)
    try:
        assert gap(engine, first[0]) < TOLERANCE
        assert (engine.ready().num_ranks, engine.ready().num_hosts) == (2, 2)
        other = save_qwen3(tmp_path / "other", seed=1)
        assert gap(engine, other) > 0.1
        receipt = push(engine, state(other), 3)
        # On each rank q, k and v are one parameter, and so are gate and up: 3 fewer in each of the two layers.
        assert (receipt.num_tensors, receipt.num_bound) == (25, 2 * (25 - 2 * 3))
        assert gap(engine, other) < TOLERANCE
        assert full_sync(engine, first[0], 4)[1].push()["sync/logprob_gap_max"] < TOLERANCE
        assert gap(engine, first[0]) < TOLERANCE
    finally:
        engine.shutdown()


def test_a_folder_in_the_memory_of_one_host_is_refused_before_anything_is_sampled(url, first):
    with pytest.raises(ConfigError, match="split over 2 hosts, and engine.transfer_dir = /dev/shm is memory of this h"):
        engine_at(url, first, "/dev/shm").ready()
