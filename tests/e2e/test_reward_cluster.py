"""The reward server with replicas as actors of a Ray cluster: equal numbers, an actor that is killed, a wrong file."""

import json
import os
import signal
import time
import urllib.request

import pytest
import torch
from servers import running_server

from unirl.reward.client import RewardClient
from unirl.reward.worlds.shapes_scorer import ShapesRewardScorer
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.matrix]

SERVICE = """
cluster: {ray_address: "%s"}
rewards:
  - {name: shapes, scorer: shapes, params: {soft_weight: 1.0}, num_gpus: 0, num_cpus: 0.5, num_replicas: 2}
"""


def replicas(url):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/status.json") as answer:
        [shapes] = json.load(answer)["rewards"]
    return shapes["replicas"]


def up(url, without=None):
    """The replicas, once both can score and none has the process id `without`: the server counts as ready with one,
    and a killed one is noticed after a while."""
    end = time.monotonic() + 300
    while True:
        found = replicas(url)
        if [each["state"] for each in found] == ["ready", "ready"] and without not in [each["pid"] for each in found]:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.1)


def test_actors_score_as_this_process_does_and_come_back_when_they_die(ray_of_two_cores, tmp_path):
    pixels = torch.randint(0, 256, (96, 3, 32, 32), generator=torch.Generator().manual_seed(0)).float() / 255
    pixels[::2, 0, 8:24, 8:24] = 1.0
    request = RewardRequest(
        sample_ids=[f"s{i}" for i in range(96)],
        primitives={"text": Texts(texts=["a red square", "a blue circle"] * 48)},
        generated={"image": Images(pixels=pixels)},
    )
    expected = ShapesRewardScorer(soft_weight=1.0).score(request).rewards
    address = ray_of_two_cores.get_runtime_context().gcs_address
    with running_server(tmp_path, SERVICE % address) as server:
        client = RewardClient(server.url, batch_size=8)
        client.wait_until_ready(300)
        assert torch.equal(client.score(request, ["shapes"])["shapes"].rewards, expected)
        first = up(server.url)[0]["pid"]
        os.kill(first, signal.SIGKILL)
        assert torch.equal(client.score(request, ["shapes"])["shapes"].rewards, expected)
        assert first not in [each["pid"] for each in up(server.url, without=first)]
        client.close()


def test_a_scorer_that_cannot_be_built_on_the_cluster_ends_the_command(ray_of_two_cores, tmp_path):
    address = ray_of_two_cores.get_runtime_context().gcs_address
    wrong = (SERVICE % address).replace("soft_weight", "soft_wait")
    with running_server(tmp_path, wrong, code=2) as server:
        server.process.wait(300)
    assert "unexpected keyword argument 'soft_wait'" in server.log.read_text()
