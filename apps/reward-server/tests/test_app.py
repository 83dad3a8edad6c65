"""The endpoints over loopback, with aiohttp's own test client."""

import asyncio
import base64
import json
import threading
from io import BytesIO

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from unirl.reward.function import FunctionRewardScorer
from unirl.reward.service import RewardService
from unirl.reward_server.app import RewardServer
from unirl.reward_server.config import ServerConfig


def png(value=128, size=(4, 3), mode="RGB"):
    """base64 PNG of one colour."""
    buffer = BytesIO()
    Image.new(mode, size, value if mode == "L" else (value,) * len(mode)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def brightness(images, prompts, metadata):
    if "explode" in prompts:
        raise RuntimeError("boom")
    return images.mean((1, 2, 3))


def colour(images, prompts, metadata):
    return {"red": images[:, 0].mean((1, 2)), "row": [row.get("row", 0) for row in metadata]}


def a_service():
    parts = {"red": 1.0, "row": 2.0}
    scorers = [FunctionRewardScorer(brightness), FunctionRewardScorer(colour, component_weights=parts)]
    return RewardService(scorers, weights={"brightness": 1.0, "colour": 0.5}, on_failure="drop_group")


def ask(*calls, service=None, config=None):
    """(status, JSON, headers) of each (method, path, body) against a fresh server, one after the other."""

    async def run():
        app = RewardServer(service or a_service(), config or ServerConfig()).application()
        async with TestClient(TestServer(app)) as client:
            answers = []
            for method, path, body in calls:
                data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
                async with client.request(method, path, data=data) as answer:
                    answers.append((answer.status, await answer.json(), answer.headers))
            return answers

    return asyncio.run(asyncio.wait_for(run(), timeout=30))


def test_health_and_rewards_name_the_scorers_their_weights_and_components():
    (_, health, _), (_, rewards, _) = ask(("GET", "/health", None), ("GET", "/rewards", None))
    assert health == {"status": "ok", "rewards": ["brightness", "colour"]}
    assert rewards == {
        "rewards": {
            "brightness": {"weight": 1.0, "components": []},
            "colour": {"weight": 0.5, "components": ["colour/red", "colour/row"]},
        },
        "aggregation": "weighted_sum",
    }


def test_score_returns_what_the_service_gives_in_the_order_asked():
    body = {"prompts": ["a", "b"], "images": [png(0), png(255)], "metadata": [{"row": 3}, {}], "ids": ["x", "y"]}
    [(status, answer, _)] = ask(("POST", "/score", body))
    assert status == 200 and answer.pop("compute_s") > 0
    assert answer == {
        "ids": ["x", "y"],
        "rewards": [3.0, 1.5],
        "components": {"brightness": [0, 1], "colour": [6, 1], "colour/red": [0, 1], "colour/row": [3, 0]},
        "successes": [True, True],
        "errors": [None, None],
    }


def test_pixels_arrive_bit_for_bit_channels_first():
    seen = []

    def keep(images, prompts, metadata):
        seen.append(images.clone())
        return [0.0] * len(prompts)

    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    body = {"prompts": ["p"], "images": [base64.b64encode(buffer.getvalue()).decode()]}
    [(status, answer, _)] = ask(("POST", "/score", body), service=RewardService([FunctionRewardScorer(keep)]))
    assert status == 200 and answer["ids"] == ["0"]
    assert torch.equal((seen[0][0] * 255).round().byte(), torch.from_numpy(pixels).permute(2, 0, 1))


def test_a_sample_that_cannot_be_scored_is_null_with_its_reason_and_the_others_are_scored():
    body = {"prompts": ["explode", "b"], "images": [png(), png(255)]}
    [(status, answer, _)] = ask(("POST", "/score", body))
    assert status == 200 and answer["rewards"] == [None, 1.5] and answer["successes"] == [False, True]
    assert answer["errors"] == ["scorer brightness: RuntimeError: boom", None]
    assert answer["components"]["colour"][0] is not None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\x00", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        ([], "must be a JSON object, got list"),
        ({"prompts": ["a"]}, "images must be a list, got nothing"),
        ({"prompts": "a", "images": []}, "prompts must be a list, got str"),
        ({"prompts": [1], "images": [png()]}, "prompts[0] must be a str, got int"),
        ({"prompts": [], "images": []}, "at least 1; got 0, 0"),
        ({"prompts": ["a", "b"], "images": [png()]}, "of one length, at least 1; got 2, 1"),
        ({"prompts": ["a"], "images": [png()], "ids": []}, "ids has 0 items for 1 prompts"),
        ({"prompts": ["a"], "images": [png()], "metadata": [3]}, "metadata[0] must be a dict, got int"),
        ({"prompts": ["a", "b"], "images": [png(), png()], "ids": ["x", "x"]}, "ids repeat"),
        ({"prompts": ["a"], "images": ["!"]}, "images[0] is not base64"),
        ({"prompts": ["a"], "images": ["AAAA"]}, "images[0] is not a PNG"),
        ({"prompts": ["a"], "images": [png()[:60]]}, "images[0] is not"),
        ({"prompts": ["a"], "images": [png(size=(20, 20))]}, "images[0] is 20 x 20, more than 300 pixels"),
        ({"prompts": ["a"], "images": [png(mode="RGBA")]}, "images[0] has mode RGBA"),
        ({"prompts": ["a", "b"], "images": [png(), png(size=(3, 3))]}, "images differ in size"),
        ({"prompts": ["a"], "images": [png()], "video": 1}, "unknown fields ['video']"),
    ],
)
def test_a_bad_request_gets_400_and_one_sentence(body, text):
    config = ServerConfig(max_image_pixels=300)
    [(status, answer, _)] = ask(("POST", "/score", body), config=config)
    assert status == 400 and list(answer) == ["error"] and text in answer["error"]


def test_grey_pictures_are_accepted():
    body = {"prompts": ["a"], "images": [png(255, mode="L")]}
    [(status, answer, _)] = ask(("POST", "/score", body))
    assert status == 200 and answer["rewards"] == [1.5]


def test_a_body_over_the_limit_gets_413_and_the_next_request_works():
    config = ServerConfig(max_body_bytes=1000, max_queued=1)
    small = {"prompts": ["a"], "images": [png()]}
    large = {"prompts": ["a" * 2000], "images": [png()]}
    (status, answer, _), (second, _, _) = ask(("POST", "/score", large), ("POST", "/score", small), config=config)
    assert status == 413 and "error" in answer and second == 200


def test_a_bug_of_a_scorer_gets_500_with_its_message_and_the_server_lives_on():
    service = RewardService([FunctionRewardScorer(lambda *a: [1.0, 2.0], name="f")])
    body = {"prompts": ["a"], "images": [png()]}
    (status, answer, _), (health, _, _) = ask(("POST", "/score", body), ("GET", "/health", None), service=service)
    assert status == 500 and answer["error"].startswith("ContractError: scorer f returned f of shape (2,)")
    assert health == 200


def test_unknown_paths_and_methods_are_json_errors_too():
    (lost, answer, _), (wrong, _, headers) = ask(("GET", "/nowhere", None), ("GET", "/score", None))
    assert lost == 404 and "error" in answer
    assert wrong == 405 and headers["Allow"] == "POST"


def waiting_service(started, proceed):
    def slow(images, prompts, metadata):
        started.set()
        proceed.wait(timeout=20)
        return [1.0] * len(prompts)

    return RewardService([FunctionRewardScorer(slow)])


def test_a_full_queue_gets_503_and_recovers():
    started, proceed = threading.Event(), threading.Event()
    body = json.dumps({"prompts": ["a"], "images": [png()]}).encode()

    async def run():
        app = RewardServer(waiting_service(started, proceed), ServerConfig(max_queued=2)).application()
        async with TestClient(TestServer(app)) as client:
            held = [asyncio.create_task(client.post("/score", data=body)) for _ in range(2)]
            while not started.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            async with client.post("/score", data=body) as refused:
                answer = await refused.json()
                assert refused.status == 503 and refused.headers["Retry-After"] == "1"
                assert answer == {"error": "2 requests are waiting; try again later"}
            proceed.set()
            assert [answer.status for answer in await asyncio.gather(*held)] == [200, 200]
            async with client.post("/score", data=body) as again:
                assert again.status == 200

    asyncio.run(asyncio.wait_for(run(), timeout=30))


def test_a_slow_scorer_gets_504_and_keeps_its_slot_until_it_ends():
    started, proceed = threading.Event(), threading.Event()
    body = json.dumps({"prompts": ["a"], "images": [png()]}).encode()

    async def run():
        config = ServerConfig(max_queued=1, score_timeout_s=0.2)
        app = RewardServer(waiting_service(started, proceed), config).application()
        async with TestClient(TestServer(app)) as client:
            async with client.post("/score", data=body) as late:
                assert late.status == 504 and "score_timeout_s = 0.2" in (await late.json())["error"]
            async with client.post("/score", data=body) as refused:
                assert refused.status == 503
            proceed.set()
            status = 503
            while status == 503:
                async with client.post("/score", data=body) as again:
                    status = again.status
            assert status == 200

    asyncio.run(asyncio.wait_for(run(), timeout=30))
