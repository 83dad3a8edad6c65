"""The HTTP side, with replicas in this process."""

import asyncio
import base64
import contextlib
import json
import signal
from io import BytesIO

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from unirl.reward.wire import BINARY_TYPE, WireSample, encode_binary, encode_json
from unirl.reward_server.app import CONNECTION_OPTIONS, RewardServer
from unirl.reward_server.settings import ServerSettings, Settings

from .fakes import FakeReplica, Maker, reward, sample, until

JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": BINARY_TYPE}
TOKEN = "a token of some length"


def png(value=0, size=(8, 8)):
    buffer = BytesIO()
    Image.new("RGB", size, (value,) * 3).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def body(*values, rewards=("r",), prompt="p"):
    turns = [{"text": prompt, "image_b64": png(value)} for value in values]
    return {"requests": [{"history": [turn], "required_rewards": list(rewards)} for turn in turns]}


async def started(app):
    """A client of a server that runs as the command would run it."""
    server = TestServer(app.application())
    options = {key: value for key, value in CONNECTION_OPTIONS.items() if key != "handler_cancellation"}
    await server.start_server(lingering_time=0.05, **options)  # TestServer itself cancels handlers
    return TestClient(server)


def serving(test, *, make=None, rewards=None, token=None, **server):
    """Run `test(client, server, make)` against a server."""
    make = make or Maker()

    async def run():
        settings = Settings(tuple(rewards or [reward()]), ServerSettings(**server))
        app = RewardServer(settings, token=token, make_replica=make)
        async with await started(app) as client:
            await until(lambda: all(pool.is_ready for pool in app.pools.values()))
            return await test(client, app, make)

    with time_limit(150):
        return asyncio.run(asyncio.wait_for(run(), 120))


@contextlib.contextmanager
def time_limit(seconds):
    """End even a loop that never lets another task run."""

    def fail(*_):
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


async def post(client, data, headers=JSON):
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    async with client.post("/score", data=content, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


def test_the_published_schema_is_answered_as_published():
    async def test(client, app, make):
        status, answer, headers = await post(client, body(3, 200, rewards=["r", "q"]))
        assert status == 200 and headers["Content-Type"].startswith("application/json")
        numbers = [{"reward": float(value), "frames": 3.0} for value in (3, 200)]
        assert answer == {"results": [{"r": each, "q": each} for each in numbers], "errors": [{}, {}]}
        assert [list(each["r"]) for each in answer["results"]] == [["reward", "frames"]] * 2
        async with client.get("/health") as health:
            expected = {"status": "ok", "rewards": {"r": ["r-0:ready"], "q": ["q-0:ready", "q-1:ready"]}}
            assert health.status == 200 and await health.json() == expected
        async with client.get("/rewards") as roster:
            assert (await roster.json())["rewards"] == ["r", "q"]

    serving(test, rewards=[reward(), reward("q", num_replicas=2)])


def test_both_bodies_give_the_same_numbers_and_samples_may_ask_for_different_rewards():
    async def test(client, app, make):
        samples = [sample(i, size=2 + i % 2, value=11 * i) for i in range(5)]
        rewards = [["r"], ["q"], ["r", "q"], ["q", "r"], ["r"]]
        binary = b"".join(encode_binary(samples, rewards))
        status, answer, _ = await post(client, binary, BINARY)
        assert status == 200 and [set(each) for each in answer["results"]] == [set(names) for names in rewards]
        assert [each.get("r", each.get("q"))["reward"] for each in answer["results"]] == [0, 11, 22, 33, 44]
        _, as_json, _ = await post(client, encode_json(samples, ["r", "q"]))
        _, as_binary, _ = await post(client, b"".join(encode_binary(samples, ["r", "q"])), BINARY)
        assert as_json == as_binary

    serving(test, rewards=[reward(), reward("q")])


def test_sounds_get_the_same_numbers_in_both_bodies():
    async def test(client, app, make):
        waveforms = [np.array(each, np.float32) for each in ([0.5, -0.25], [0.125])]
        samples = [
            WireSample(id=str(i), kind="audio", media=each, sample_rate=8_000, source_sound=each, source_sample_rate=7)
            for i, each in enumerate(waveforms)
        ]
        status, as_json, _ = await post(client, encode_json(samples, ["r"]))
        assert status == 200 and [each["r"]["reward"] for each in as_json["results"]] == [0.125, 0.125]
        _, as_binary, _ = await post(client, b"".join(encode_binary(samples, ["r"])), BINARY)
        assert as_binary == as_json and len(make.made[0].batches) >= 2

    serving(test)


def test_a_sample_that_fails_has_a_reason_without_folders_and_no_number():
    async def test(client, app, make):
        texts = [WireSample(id=p, kind="text", media="abc", prompt=p) for p in ("explode", "fine")]
        status, answer, _ = await post(client, encode_json(texts, ["r"]))
        assert status == 200 and answer["results"] == [{}, {"r": {"reward": 3.0}}]
        assert answer["errors"] == [{"r": "ValueError: cannot open weights.bin: boom"}, {}]
        async with client.get("/status.json") as page:
            content = await page.json()
        assert content["rewards"][0]["failed"] == 1 and "/srv" not in json.dumps(content)

    serving(test)


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"", 422, "the body is empty"),
        (b"{", 422, "the body is not JSON"),
        ({}, 422, "the body has no requests"),
        ({"requests": [{"history": [{"text": "a", "image_b64": png()}]}]}, 422, "has no required_rewards"),
        ({"requests": []}, 400, "requests has 0 entries"),
        ({"requests": [{"history": [], "required_rewards": ["r"]}]}, 400, "history has 0 turns"),
        ({"requests": [{"history": [{"text": "a"}], "required_rewards": ["r"]}]}, 400, "exactly one of image_b64"),
        ({"requests": [{"history": [{"image_b64": "?"}], "required_rewards": ["r"]}]}, 400, "is not base64"),
        (
            {"requests": [{"history": [{"video_path": "/etc/passwd"}], "required_rewards": ["r"]}]},
            400,
            "reads no files",
        ),
        (body(1, rewards=["reward"]), 400, "there is no reward 'reward'; did you mean r?"),
        (body(1, 2, 3, 4, 5), 400, "requests has 5 entries; 1 to 4"),
        ({"requests": [{"history": [{"image_b64": png(size=(30, 9))}], "required_rewards": ["r"]}]}, 400, "30 x 9"),
    ],
)
def test_a_wrong_body_gets_400_or_422_and_one_sentence(data, status, text):
    async def test(client, app, make):
        for _ in range(2):  # the server must be as well after such a body as before
            got, answer, _ = await post(client, data)
            assert got == status and list(answer) == ["detail"] and text in answer["detail"]
        assert not make.made[0].batches

    serving(test, max_samples=4, max_image_pixels=256)


def test_a_cut_or_empty_binary_body_gets_422_and_other_types_415():
    async def test(client, app, make):
        whole = b"".join(encode_binary([sample("a")], ["r"]))
        for cut in (whole[:-1], b"", whole[:-1], b""):
            assert (await post(client, cut, BINARY))[0] == 422
        for headers in ({"Content-Type": "text/plain"}, JSON | {"Content-Encoding": "gzip"}):
            status, answer, _ = await post(client, json.dumps(body(1)).encode(), headers)
            assert status == 415 and BINARY_TYPE in answer["detail"]
        assert (await post(client, whole, BINARY))[0] == 200

    serving(test)


def test_bodies_over_the_limit_get_413_announced_or_not():
    async def test(client, app, make):
        async def pieces():
            for _ in range(20):
                yield b"[" * 1000

        assert (await post(client, b"[" * 5001))[0] == 413
        async with client.post("/score", data=pieces(), headers=JSON) as answer:
            assert answer.status == 413
        assert (await post(client, body(1)))[0] == 200
        assert app._bodies.num_pending == 0

    serving(test, max_body_bytes=5000)


def test_requests_that_hold_too_much_memory_together_get_429():
    async def test(client, app, make):
        make.made[0].may_score.clear()
        data = b"".join(encode_binary([sample("a", size=20)], ["r"]))
        first = asyncio.create_task(post(client, data, BINARY))
        await make.made[0].asked.wait()
        status, answer, headers = await post(client, data, BINARY)
        assert status == 429 and "max_pending_bytes" in answer["detail"] and headers["Retry-After"] == "1"
        make.made[0].may_score.set()
        assert (await first)[0] == 200 and (await post(client, data, BINARY))[0] == 200

    serving(test, max_pending_bytes=2000)


def test_bodies_that_are_announced_and_not_sent_hold_no_memory_and_refuse_nobody():
    async def test(client, app, make):
        head = "POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 900000\r\n\r\n{"
        slow = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(4)]
        for _, writer in slow:
            writer.write(head.encode())
        await until(lambda: app._num_requests == 4 and app._bodies.num_pending == 4)
        assert (await post(client, body(1)))[0] == 200
        for _, writer in slow:
            writer.close()
        await until(lambda: app._num_requests == 0 and app._bodies.num_pending == 0)

    serving(test, max_pending_bytes=1_000_000, max_body_bytes=1_000_000)


def test_a_large_body_of_unknown_size_arrives_whole():
    async def test(client, app, make):
        whole = b"".join(encode_binary([sample("a", size=1000, value=9)], ["r"]))

        async def pieces():
            for start in range(0, len(whole), 300_000):
                yield whole[start : start + 300_000]

        for data in (whole, pieces()):
            async with client.post("/score", data=data, headers=BINARY) as answer:
                assert (await answer.json())["results"] == [{"r": {"reward": 9.0, "frames": 3.0}}]
        assert app._bodies.num_pending == 0

    serving(test)


def animation(num_frames, size=(8, 8)):
    buffer = BytesIO()
    first, *rest = [Image.new("RGB", size, (60 * value, 0, 0)) for value in range(num_frames)]
    first.save(buffer, "WEBP", save_all=True, append_images=rest)
    return base64.b64encode(buffer.getvalue()).decode()


def test_media_that_a_scorer_does_not_take_is_not_sent_to_it():
    images = FakeReplica()
    images.card["media"] = ["image"]

    async def test(client, app, make):
        turns = [{"text": "p", "video_b64": animation(3)}, {"text": "p", "image_b64": png(5)}]
        call = {"requests": [{"history": [turn], "required_rewards": ["r", "q"]} for turn in turns]}
        status, answer, _ = await post(client, call)
        assert status == 200 and set(answer["results"][0]) == {"q"} and set(answer["results"][1]) == {"r", "q"}
        assert answer["errors"] == [{"r": "reward r scores image, this sample is of kind video"}, {}]
        assert images.batches == [["1"]]

    serving(test, make=Maker(images), rewards=[reward(), reward("q")])


def test_media_that_no_reward_takes_are_not_decoded():
    images = FakeReplica()
    images.card["media"] = ["image"]

    async def test(client, app, make):
        turns = [{"text": "p", "video_b64": "bm8gdmlkZW8="}, {"text": "p", "image_b64": png(5)}]
        call = {"requests": [{"history": [turn], "required_rewards": ["r"]} for turn in turns]}
        status, answer, _ = await post(client, call)
        assert status == 200 and answer["results"] == [{}, {"r": {"reward": 5.0, "frames": 3.0}}]
        assert answer["errors"] == [{"r": "reward r scores image, this sample is of kind video"}, {}]

    serving(test, make=Maker(images))


def test_an_animation_that_decodes_to_too_much_is_refused():
    async def test(client, app, make):
        turn = {"text": "p", "video_b64": animation(4)}
        status, answer, _ = await post(client, {"requests": [{"history": [turn], "required_rewards": ["r"]}]})
        assert status == 400 and "video_b64 takes more than max_video_bytes = 600 when decoded" in answer["detail"]

    serving(test, max_video_bytes=600)


def test_a_full_queue_gets_429_with_retry_after_and_nothing_of_the_request_is_queued():
    async def test(client, app, make):
        for replica in make.made:
            replica.may_score.clear()
        first = asyncio.create_task(post(client, body(1, 2)))
        await make.made[0].asked.wait()
        second = asyncio.create_task(post(client, body(1, 2, 3)))
        await until(lambda: app.pools["r"].num_waiting == 3)
        status, answer, headers = await post(client, body(1, rewards=["q", "r"]))
        assert status == 429 and "max_queue = 3" in answer["detail"] and int(headers["Retry-After"]) >= 1
        assert app.pools["q"].num_waiting == 0 and not make.made[1].batches
        for replica in make.made:
            replica.may_score.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]

    serving(test, rewards=[reward(max_queue=3), reward("q")])


def test_what_is_not_scored_in_time_has_an_error_and_other_rewards_their_numbers():
    async def test(client, app, make):
        make.made[0].may_score.clear()
        status, answer, _ = await post(client, body(5, rewards=["r", "q"]))
        assert status == 200 and answer["results"][0]["q"]["reward"] == 5
        assert list(answer["errors"][0]) == ["r"] and "not scored within" in answer["errors"][0]["r"]

    serving(test, rewards=[reward(), reward("q")], score_timeout_s=2.0)


def test_a_client_that_leaves_cancels_its_samples():
    async def test(client, app, make):
        make.made[0].may_score.clear()
        task = asyncio.create_task(post(client, body(1)))
        await make.made[0].asked.wait()
        waiting = asyncio.create_task(post(client, body(1, 2, 3)))
        await until(lambda: app.pools["r"].num_waiting == 3)
        for each in (task, waiting):
            each.cancel()
        await until(lambda: make.made[0].cancelled == 1 and app.pools["r"].num_waiting == 0)
        await until(lambda: app._bodies.num_pending == 0 and app._num_requests == 0)

    serving(test)


def test_a_half_sent_body_gets_408_and_frees_what_it_held():
    async def test(client, app, make):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = "POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        writer.write(head.encode())
        answer = await reader.read()
        assert b" 408 " in answer and b"body_timeout_s = 1 s" in answer and app._bodies.num_pending == 0
        writer.close()
        assert (await post(client, body(1)))[0] == 200

    serving(test, body_timeout_s=1.0)


def test_every_path_but_the_page_and_readiness_needs_the_token():
    async def test(client, app, make):
        good = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/health", "/rewards", "/metrics", "/status.json", "/nowhere"):
            async with client.get(path) as answer:
                assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                assert "r" not in (await answer.json()).get("rewards", {})
        for path in ("/", "/ready", "/openapi.json"):
            async with client.get(path) as answer:
                assert answer.status == 200
        for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer ", "Bearer \xff"):
            assert (await post(client, body(1), JSON | {"Authorization": wrong}))[0] == 401
        assert (await post(client, body(1), JSON | good))[0] == 200
        async with client.get("/health", headers=good) as answer:
            assert answer.status == 200

    serving(test, token=TOKEN)


def test_a_draining_server_finishes_what_it_has_and_refuses_the_rest():
    async def test(client, app, make):
        make.made[0].may_score.clear()
        first = asyncio.create_task(post(client, body(9)))
        await make.made[0].asked.wait()
        draining = asyncio.create_task(app.drain())
        await until(lambda: app.is_draining)
        status, answer, headers = await post(client, body(1))
        assert status == 503 and "stopping" in answer["detail"] and "Retry-After" in headers
        async with client.get("/ready") as ready:
            assert ready.status == 503
        assert not draining.done()
        make.made[0].may_score.set()
        assert (await first)[1]["results"][0]["r"]["reward"] == 9
        await draining

    serving(test)


def test_ready_says_503_until_every_reward_is_loaded():
    class Slow(FakeReplica):
        async def start(self):
            await self.may_score.wait()

    async def run():
        slow = Slow()
        slow.may_score.clear()
        app = RewardServer(Settings((reward(),)), make_replica=Maker(slow))
        async with await started(app) as client:
            async with client.get("/ready") as answer:
                assert answer.status == 503 and (await answer.json())["detail"] == "1 rewards are not ready"
            async with client.get("/health") as answer:
                assert (await answer.json())["rewards"] == {"r": ["r-0:starting"]}
            slow.may_score.set()
            await until(lambda: app.pools["r"].is_ready)
            async with client.get("/ready") as answer:
                assert answer.status == 200

    asyncio.run(asyncio.wait_for(run(), 120))


def test_videos_are_read_below_the_roots_only(tmp_path):
    root, outside = tmp_path / "clips", tmp_path / "secret"
    root.mkdir()
    outside.mkdir()
    frames = [Image.fromarray(np.full((4, 4, 3), 10 * i, np.uint8)) for i in range(3)]
    for folder in (root, outside):
        frames[0].save(folder / "a.png", save_all=True, append_images=frames[1:])
    (root / "link.png").symlink_to(outside / "a.png")
    (root / "inner.png").symlink_to(root / "a.png")

    async def test(client, app, make):
        async def ask(path):
            turn = {"text": "p", "video_path": str(path)}
            return await post(client, {"requests": [{"history": [turn], "required_rewards": ["r"]}]})

        for path in (root / "a.png", "a.png", "inner.png"):
            status, answer, _ = await ask(path)
            assert status == 200 and answer["results"][0]["r"] == {"reward": 10.0, "frames": 4.0}
        answers = [
            await ask(path)
            for path in (outside / "a.png", "../secret/a.png", "link.png", "no.png", ".", "a\0b", "/nowhere")
        ]
        assert {status for status, _, _ in answers} == {400}
        assert len({json.dumps(answer) for _, answer, _ in answers}) == 1 and str(tmp_path) not in str(answers)

    serving(test, video_roots=[str(root)])


def test_metrics_count_what_happened_and_the_page_allows_only_its_own_script():
    async def test(client, app, make):
        await post(client, body(1, 2))
        await post(client, {})
        async with client.get("/metrics") as answer:
            text = await answer.text()
        assert 'reward_server_requests_total{path="/score",status="200"} 1.0' in text
        assert 'reward_server_requests_total{path="/score",status="422"} 1.0' in text
        assert 'reward_server_samples_total{outcome="scored",reward="r"} 2.0' in text
        assert 'reward_server_replicas{reward="r",state="ready"} 1.0' in text
        async with client.get("/") as answer:
            assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
            assert "Reward server" in await answer.text()

    serving(test)


def test_unknown_paths_and_methods_are_json_errors_too():
    async def test(client, app, make):
        async with client.get("/nowhere") as answer:
            assert answer.status == 404 and "detail" in await answer.json()
        async with client.get("/score") as answer:
            assert answer.status == 405 and answer.headers["Allow"] == "POST"

    serving(test)


def test_a_bug_of_the_server_is_a_500_without_its_trace(monkeypatch):
    async def test(client, app, make):
        monkeypatch.setattr(app, "_answers", lambda call: 1 / 0)
        status, answer, _ = await post(client, body(1))
        assert status == 500 and answer == {"detail": "internal error; the server's log has it"}

    serving(test)
