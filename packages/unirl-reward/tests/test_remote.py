"""The client of reward servers over real HTTP: the numbers of this process, and every fault a retry or one message."""

import asyncio
import email.utils
import logging
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from aiohttp import web

from unirl.reward.client import RewardClient
from unirl.reward.endpoints import Endpoints, Failure, RetryPolicy, retry_after_s
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.local.images.compressibility import JPEGCompressibilityScorer
from unirl.reward.remote import RemoteRewardBackend
from unirl.reward.service import RewardService
from unirl.reward.worlds.shapes_scorer import ShapesRewardScorer
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Texts, Videos
from unirl.types.protocols.closing import Closeable
from unirl.types.protocols.rewards import ConcurrentScorer, Scorer

from .fake_server import FakeServer, problem

QUICK: dict[str, Any] = {"retry_delay_s": 0.0, "start_timeout_s": 0.0, "timeout_s": 60.0}
COLOURS = ("red", "green", "blue", "yellow")


def local():
    return {"jpeg": JPEGCompressibilityScorer(name="jpeg"), "shapes": ShapesRewardScorer()}


@pytest.fixture
def pictures(make_request):
    """A request of shapes prompts whose pixels are not bytes."""

    def make(num_samples=6):
        return make_request(num_samples, prompts=[f"a {COLOURS[i % 4]} square" for i in range(num_samples)], size=32)

    return make


def same(left, right):
    return left.replace(compute_s=0.0, counters=None).equals(right.replace(compute_s=0.0, counters=None))


def remote(server, rewards="shapes", **options):
    return RemoteRewardBackend(server.url, [rewards] if isinstance(rewards, str) else rewards, **QUICK | options)


def test_one_reward_is_that_of_this_process_bit_for_bit(pictures):
    with FakeServer(local()) as server:
        request = pictures(7)
        scorer = remote(server, batch_size=3)
        assert isinstance(scorer, Scorer) and isinstance(scorer, ConcurrentScorer) and isinstance(scorer, Closeable)
        there = RewardService([scorer]).score(request)
        assert same(there, RewardService([ShapesRewardScorer()]).score(request))
        assert set(there.component_rewards) == {"shapes", "shapes/strict", "shapes/soft"}
        assert sorted(server.asked) == [["s0", "s1", "s2"], ["s3", "s4", "s5"], ["s6"]]


def test_several_rewards_travel_together_and_are_weighted_like_scorers(pictures):
    with FakeServer(local()) as server:
        request = pictures()
        scorer = remote(server, ["jpeg", "shapes"], reward_weights={"jpeg": 0.25, "shapes": 2.0})
        there = RewardService([scorer]).score(request)
        here = RewardService(local(), weights={"jpeg": 0.25, "shapes": 2.0}).score(request)
        assert torch.equal(there.rewards, here.rewards) and len(server.asked) == 1
        parts = {f"remote/{name}": value for name, value in here.component_rewards.items()}
        assert there.component_rewards.keys() == {"remote", *parts}
        assert all(torch.equal(there.component_rewards[name], value) for name, value in parts.items())


@pytest.mark.parametrize("transport", ["binary", "json"])
def test_pixels_that_are_bytes_travel_either_way(pictures, transport):
    request = pictures()
    request.pixels.copy_((request.pixels * 255).round() / 255)
    with FakeServer(local()) as server:
        scored = RewardService([remote(server, transport=transport)]).score(request)
    assert same(scored, RewardService([ShapesRewardScorer()]).score(request))
    assert server.types == ["application/json" if transport == "json" else "application/vnd.unirl.score+safetensors"]


def test_json_refuses_pixels_that_it_would_round_and_uint8_rounds_them(pictures):
    request = pictures()
    with FakeServer(local()) as server:
        with pytest.raises(ContractError, match="float32"):
            RewardService([remote(server, transport="json")]).score(request)
        rounded = RewardService([remote(server, transport="json", pixels="uint8")]).score(request)
    request.pixels.copy_((request.pixels * 255).round() / 255)
    assert same(rounded, RewardService([ShapesRewardScorer()]).score(request))


def test_videos_and_texts_travel_too(make_request):
    def length(media, prompts, metadata):
        return [float(len(each)) for each in media]

    request = make_request(num_samples=3)
    generator = torch.Generator().manual_seed(0)
    videos = Videos.pack(frames=[torch.rand(n, 3, 8, 8, generator=generator) for n in (2, 2, 2)], fps=8.0)
    with FakeServer({"length": FunctionRewardScorer(length, name="length")}) as server:
        service = RewardService([remote(server, "length")])
        assert service.score(request.replace(generated={"video": videos})).rewards.tolist() == [2.0] * 3
        texts = request.replace(generated={"text": Texts(texts=["a", "bc", "def"])})
        assert service.score(texts).rewards.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "fault",
    ["cut", problem(500, "internal error"), problem(503, "stopping", Retry_After="0"), problem(502, "bad gateway")],
    ids=["cut", "500", "503", "502"],
)
def test_only_the_chunk_that_failed_is_sent_again(pictures, fault):
    with FakeServer(local(), faults=[fault]) as server:
        scored = RewardService([remote(server, batch_size=2, max_concurrency=1)]).score(pictures())
        assert scored.successes == [True] * 6 and scored.sample_ids == [f"s{i}" for i in range(6)]
        assert server.asked == [["s0", "s1"], ["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]


def test_a_full_queue_is_waited_for_as_long_as_it_asks_and_uses_up_no_retry(pictures, caplog):
    faults = [problem(429, "the queue is full", Retry_After="0") for _ in range(5)]
    with FakeServer(local(), faults=faults) as server, caplog.at_level(logging.WARNING):
        scored = RewardService([remote(server, max_retries=0)]).score(pictures())
    assert scored.successes == [True] * 6 and len(server.asked) == 6
    assert "429 the queue is full" in caplog.text


def test_a_queue_that_stays_full_ends_at_the_deadline(pictures):
    with FakeServer(local(), faults=[problem(429, "full", Retry_After="60")]) as server:
        service = RewardService([remote(server, deadline_s=30.0)])
        with pytest.raises(RewardError, match=r"429 full \(deadline_s = 30 is used up\)"):
            service.score(pictures())
    assert len(server.asked) == 1


def test_a_slow_server_is_given_up_after_the_timeout_and_asked_again(pictures):
    with FakeServer(local(), faults=["hang"]) as server:
        scored = RewardService([remote(server, timeout_s=2.0)]).score(pictures())
        assert scored.successes == [True] * 6 and len(server.asked) == 2
        server.faults = ["hang"]
        with pytest.raises(RewardError, match=r"no answer within 1 s \(attempt 1 of 1\)"):
            RewardService([remote(server, timeout_s=1.0, max_retries=0)]).score(pictures())


def test_what_no_server_answers_fails_with_its_reason_and_the_rest_is_kept(pictures):
    with FakeServer(local(), faults=[problem(500, "broken") for _ in range(2)]) as server:
        scorer = remote(server, batch_size=2, max_concurrency=1, max_retries=1)
        scored = RewardService([scorer], on_failure="drop_group").score(pictures())
    assert scored.successes == [False, False, True, True, True, True] and scored.rewards[:2].isnan().all()
    assert scored.errors[0] == f"scorer shapes: {server.url}: 500 broken (attempt 2 of 2)"
    assert scored.component_rewards["shapes/strict"][:2].isnan().all()


def test_the_service_retries_the_samples_that_no_server_answered(pictures):
    with FakeServer(local(), faults=[problem(500, "broken") for _ in range(2)]) as server:
        scorer = remote(server, batch_size=2, max_concurrency=1, max_retries=1)
        scored = RewardService([scorer], on_failure="retry").score(pictures())
        assert same(scored, RewardService([ShapesRewardScorer()]).score(pictures()))
        assert scored.counters is not None and scored.counters["retried_samples"] == 2
        assert server.asked[-1] == ["s0", "s1"]


def test_a_sample_that_the_server_cannot_score_has_the_servers_reason(pictures):
    request = pictures()
    request.primitives["text"].texts[3] = "an essay on circles"
    with FakeServer(local()) as server:
        scored = RewardService([remote(server)], on_failure="drop_group").score(request)
        assert scored.successes == [True, True, False, False, True, True]
        reason = str(scored.errors[3])
        assert "essay" in reason and reason.startswith("scorer shapes: ValueError")
        both = RewardService([remote(server, ["jpeg", "shapes"])], on_failure="drop_group").score(request)
        assert str(both.errors[3]).startswith("scorer remote: reward shapes: ValueError")
        assert not both.component_rewards["remote/jpeg"][3].isnan()
        with pytest.raises(RewardError, match="no finite reward for 1 sample .s3: ValueError"):
            RewardService([remote(server)]).score(request)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"results": [{"shapes": {"reward": NaN}}], "errors": [{}]}', "cannot read: the answer is not JSON"),
        (b'{"results": [], "errors": []}', "results must be a list of 6 objects"),
        (b"<html>welcome</html>", "cannot read: the answer is not JSON"),
    ],
)
def test_an_answer_that_cannot_be_read_is_one_message_and_no_number(pictures, answer, message):
    with FakeServer(local(), faults=[web.Response(body=answer)]) as server:
        service = RewardService([remote(server)], on_failure="drop_group")
        with pytest.raises(ContractError, match=message + ".*Install the same version of unirl-reward"):
            service.score(pictures())
        assert len(server.asked) == 1


def test_values_that_are_no_numbers_fail_their_samples(pictures):
    values = ["null", "1e999", '"1"', "true", "0.5", "{}"]
    results = ", ".join(f'{{"shapes": {{"reward": {value}}}}}' for value in values)
    answer = f'{{"results": [{results}], "errors": [{", ".join(["{}"] * 6)}]}}'.encode()
    with FakeServer(local(), faults=[web.Response(body=answer)]) as server:
        found = remote(server).score(pictures())
    assert found.successes == [False, False, False, False, True, False] and found.rewards[4] == 0.5
    assert all("not finite fp32 numbers" in str(error) for row, error in enumerate(found.errors) if row != 4)


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (problem(400, "there is no reward 'shapes'"), "400 there is no reward"),
        (problem(413, "too large"), "413 too large. Lower batch_size"),
        (
            problem(422, "unirl_score.version is 1; this side speaks version 9"),
            "set transport: json, or install the same",
        ),
        (web.Response(status=307, headers={"Location": "http://elsewhere.invalid/score"}), "Is base_url that of a"),
    ],
    ids=["400", "413", "422", "redirect"],
)
def test_a_request_that_the_server_refuses_is_not_repeated(pictures, fault, advice):
    with FakeServer(local(), faults=[fault]) as server:
        service = RewardService([remote(server)], on_failure="drop_group")
        with pytest.raises(ContractError, match=advice):
            service.score(pictures())
        assert len(server.asked) == 1


def test_a_server_that_restarts_in_between_is_found_again(pictures, caplog):
    scorers = local()
    with FakeServer(scorers) as server:
        scorer = remote(server, batch_size=2, max_retries=30, retry_delay_s=0.01)
        service = RewardService([scorer])
        expected = service.score(pictures())
    ticket = service.submit(pictures())
    with caplog.at_level(logging.WARNING), FakeServer(scorers, port=server.port) as again:
        assert same(service.collect(ticket).replace(gauges=None), expected)
    assert sum(len(ids) for ids in again.asked) == 6
    service.close()


def test_several_servers_share_the_work_and_one_that_dies_is_replaced(pictures):
    both = threading.Barrier(2, timeout=600)

    def meets(images, prompts, metadata):
        both.wait()
        return [0.0] * len(prompts)

    scorer = {"meets": FunctionRewardScorer(meets, name="meets")}
    with FakeServer(scorer) as first, FakeServer(scorer) as second:
        backend = RemoteRewardBackend([first.url, second.url], ["meets"], batch_size=3, **QUICK)
        assert RewardService([backend]).score(pictures()).successes == [True] * 6
        assert [len(first.asked), len(second.asked)] == [1, 1]
    with FakeServer(local()) as first:
        with FakeServer(local()) as second:
            backend = RemoteRewardBackend([second.url, first.url], ["shapes"], batch_size=1, **QUICK)
        assert RewardService([backend]).score(pictures()).successes == [True] * 6
        assert len(first.asked) == 6 and not second.asked


def test_connections_are_kept_alive(pictures):
    with FakeServer(local()) as server:
        service = RewardService([remote(server, batch_size=2, max_concurrency=1)])
        for _ in range(3):
            service.score(pictures())
        assert len(server.asked) == 9 and len(server.connections) == 1


def test_no_more_requests_are_under_way_than_allowed(pictures):
    lock, now, most = threading.Lock(), [0], [0]

    class Counts(JPEGCompressibilityScorer):
        def score_batch(self, request):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            try:
                return super().score_batch(request)
            finally:
                with lock:
                    now[0] -= 1

    with FakeServer({"jpeg": Counts(name="jpeg")}) as server:
        scorer = remote(server, "jpeg", batch_size=1, max_concurrency=2)
        service = RewardService([scorer])
        tickets = [service.submit(pictures()) for _ in range(2)]
        assert [service.collect(ticket).successes for ticket in tickets] == [[True] * 6] * 2
    assert most[0] <= 2 and len(server.asked) == 12


@pytest.mark.parametrize("how", ["keyword", "file"])
def test_the_token_is_sent_and_a_wrong_one_is_one_message_at_the_start(pictures, how, tmp_path):
    (tmp_path / "token").write_text("secret-of-the-server\n")
    good = {"token": "secret-of-the-server"} if how == "keyword" else {"token_file": str(tmp_path / "token")}
    with FakeServer(local(), token="secret-of-the-server") as server:
        assert RewardService([remote(server, **good)]).score(pictures()).successes == [True] * 6
        for wrong in ({}, {"token": "guess"}):
            with pytest.raises(ConfigError, match="refuses the token: 401 send the server's token. Set token_file"):
                remote(server, **wrong)
        late = remote(server, **good)
        server.token = "another"
        with pytest.raises(ConfigError, match="refuses the token"):
            RewardService([late], on_failure="drop_group").score(pictures())


def test_a_password_of_the_address_is_sent_and_shown_nowhere(pictures, caplog):
    request = pictures()
    with FakeServer(local(), password="pass/word") as server:
        address = server.url.replace("://", "://me:pass%2Fword@")
        with RewardClient(address, max_retries=1, retry_delay_s=0.0) as client:
            assert client.score(request, ["jpeg"])["jpeg"].successes == [True] * 6
            assert client.urls == [server.url] and list(client.rewards()) == list(client.health()) == [server.url]
            server.faults += [problem(500, "a bug"), problem(500, "a bug")]
            (why,) = {str(text) for text in client.score(request, ["jpeg"])["jpeg"].errors}
        wrong = server.url.replace("://", "://me:pass%2Fwordy@")
        said = [why, caplog.text]
        for url, more in (
            (wrong, {}),
            (server.url.replace("://", "://me:pass/word@"), {}),
            (address, {"token": "a"}),
            ([address, wrong], {}),
            ("ftp://me:pass/word@host", {}),
        ):
            with pytest.raises(ConfigError) as caught:
                RemoteRewardBackend(url, ["jpeg"], **QUICK, **more)
            said.append(str(caught.value))
    assert server.url in why and "refuses the token: 401" in said[2] and "%2F %23" in said[3]
    assert caplog.records and not [text for text in said if "word" in text.replace("password", "")]


def test_a_wrong_roster_names_what_there_is(pictures):
    with FakeServer(local()) as server:
        with pytest.raises(
            ConfigError, match=r"has no reward 'shape'; it has \['jpeg', 'shapes'\]. Did you mean 'shapes'"
        ):
            remote(server, "shape")
        with FakeServer({"jpeg": JPEGCompressibilityScorer(name="jpeg")}) as other:
            with pytest.raises(ConfigError, match=f"{other.url} has no reward 'shapes'"):
                RemoteRewardBackend([server.url, other.url], ["shapes"], **QUICK)


def test_a_server_that_is_not_there_is_one_message():
    with pytest.raises(
        ConfigError, match=r"1 of 1 reward servers are not ready after 0 s: http://127.0.0.1:1: .*Start"
    ):
        RemoteRewardBackend("http://127.0.0.1:1/", ["shapes"], **QUICK)


def test_a_server_that_still_loads_is_waited_for():
    with FakeServer(local(), ready=[503, 503]) as server:
        assert remote(server, start_timeout_s=60.0).name == "shapes"
        server.ready = [503]
        with pytest.raises(ConfigError, match="still loading"):
            remote(server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "127.0.0.1:8080"}, "base_url = '127.0.0.1:8080' must be one or several different URLs"),
        ({"base_url": []}, "must be one or several"),
        ({"base_url": ["http://a", "http://a/"]}, "different URLs"),
        ({"required_rewards": []}, "must name one or several rewards"),
        ({"required_rewards": ["a", "a"]}, "each once"),
        ({"reward_weights": {"b": 1.0}}, "weights name 'b'"),
        ({"transport": "pickle"}, "transport = 'pickle'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"timeout_s": 0}, "timeout_s = 0 must be above 0"),
        ({"token": "a", "token_file": "b"}, "both given"),
        ({"token_file": "/nowhere/token"}, "token_file = '/nowhere/token' cannot be read"),
    ],
)
def test_impossible_values_say_what_to_change(options, message):
    with pytest.raises(ConfigError, match=message):
        RemoteRewardBackend(**{"base_url": "http://127.0.0.1:1", "required_rewards": ["a"], **QUICK} | options)


def test_closing_ends_a_request_that_hangs(pictures):
    with FakeServer(local(), faults=["hang"]) as server:
        service = RewardService([remote(server)])
        ticket = service.submit(pictures())
        job = service._open[ticket][1]["shapes"].jobs[0]
        assert server.was_asked.wait(60)
        service.close()
        with pytest.raises(RewardError, match="the reward client was closed while it waited"):
            job.answer.result(60)
        with pytest.raises(ContractError, match="this reward client is closed"):
            service.scorers["shapes"].score(pictures())


def test_a_process_ends_while_a_scorer_and_a_server_hang():
    code = """
import sys, threading
import unirl.reward.scorer_queues as queues
from unirl.reward.remote import RemoteRewardBackend
from unirl.reward.service import RewardService
from unirl.types.media import Texts
from unirl.types.reward import RewardRequest
queues._LEAVE_TIMEOUT_S = 0.1
class Hangs:
    name = "hangs"
    def score(self, request):
        begun.set()
        threading.Event().wait()
begun = threading.Event()
service = RewardService([Hangs(), RemoteRewardBackend(sys.argv[1], ["shapes"])])
texts = Texts(texts=["x"])
service.submit(RewardRequest(sample_ids=["s0"], primitives={"text": texts}, generated={"text": texts}))
begun.wait()
"""
    with FakeServer(local(), faults=["hang"] * 9) as server:
        done = subprocess.run([sys.executable, "-c", code, server.url], timeout=600, capture_output=True, text=True)
    assert done.returncode == 0 and "scorer hangs is still busy" in done.stderr, done.stderr


def test_proxies_of_the_environment_are_used_only_when_asked_for(pictures, monkeypatch):
    seen = []

    async def forward(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head.partition(b"\r\n")[0].decode())
        body = b'{"status": "ok", "rewards": {}}'
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()
        writer.close()

    started, stop, port = threading.Event(), asyncio.Event(), [0]

    async def serve():
        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        port[0] = server.sockets[0].getsockname()[1]
        started.set()
        async with server:
            await stop.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port[0]}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port[0]}")
    with RewardClient("http://reward.invalid:8080", trust_env=True) as client:
        assert client.health() == {"http://reward.invalid:8080": {"status": "ok", "rewards": {}}}
    assert seen == ["GET http://reward.invalid:8080/health HTTP/1.1"]
    with RewardClient("http://reward.invalid:8080") as client:
        assert client.health()["http://reward.invalid:8080"]["status"].startswith("unreachable")
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


def test_the_client_alone_scores_lists_and_asks_after_health(pictures):
    with FakeServer(local(), token="t" * 16) as server, RewardClient(server.url, token="t" * 16) as client:
        found = client.score(pictures(), ["jpeg", "shapes"])
        assert list(found) == ["jpeg", "shapes"] and found["shapes"].sample_ids == pictures().sample_ids
        assert client.rewards() == {server.url: ["jpeg", "shapes"]}
        assert client.health()[server.url]["rewards"]["jpeg"] == ["jpeg-0:ready"]
        with pytest.raises(ContractError, match="nothing to score"):
            client.score(pictures(), [])
    with RewardClient(server.url) as client:
        assert "unreachable" in client.health()[server.url]["status"]
        with pytest.raises(RewardError, match=f"{server.url}/rewards"):
            client.rewards()


def test_pauses_are_drawn_from_a_range_that_doubles_and_move_no_seed():
    endpoints = Endpoints(["http://a"], RetryPolicy(retry_delay_s=1.0), token=None, trust_env=False)
    failure = Failure("gone")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    for k, longest in ((1, 2.0), (2, 4.0), (4, 16.0), (9, 30.0)):
        pauses = [endpoints._pause_s(failure, k) for _ in range(400)]
        assert 0 <= min(pauses) < 0.1 * longest and 0.9 * longest < max(pauses) <= longest
    assert torch.equal(torch.random.get_rng_state(), before)


def test_retry_after_is_seconds_or_a_date():
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert retry_after_s({"Retry-After": "7"}) == 7.0
    assert retry_after_s({"Retry-After": in_a_minute}) == pytest.approx(60, abs=40)
    assert retry_after_s({"Retry-After": email.utils.formatdate(0, usegmt=True)}) == 0.0
    assert retry_after_s({}) is None and retry_after_s({"Retry-After": "soon"}) is None
