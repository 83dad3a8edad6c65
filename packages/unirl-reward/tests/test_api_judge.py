"""The judge behind HTTP, against a real local server that speaks chat completions."""

import base64
import json
import math
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from unirl.reward.local.judges.api_judge import APIJudge
from unirl.reward.local.judges.judge import JudgeError, Question, Reply
from unirl.types.errors import ConfigError

PICTURE = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


class Endpoint(ThreadingHTTPServer):
    """Chat completions with settable manners. It sees every request body in `bodies`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.tokens: list[str | None] = []
        self.has_logprobs = True
        self.refuses_logprobs = False
        self.rivals = [("Yes", 0.5), (" yes", 0.125), ("No", 0.25)]
        self.text = "Yes"
        self.failures: list[tuple[int, dict[str, str]]] = []
        self.key: str | None = None
        self.lock = threading.Lock()
        self.most_at_once = 0
        self.at_once = 0
        self.gate: threading.Barrier | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict) -> tuple[int, dict, dict[str, str]]:
        if self.failures:
            status, headers = self.failures.pop(0)
            return status, {"error": {"message": f"failure {status}"}}, headers
        if self.refuses_logprobs and body.get("logprobs"):
            return 400, {"error": {"message": "logprobs are not supported"}}, {}
        steps = [
            {
                "token": self.rivals[0][0],
                "logprob": math.log(self.rivals[0][1]),
                "bytes": None,
                "top_logprobs": [
                    {"token": token, "logprob": math.log(value), "bytes": None} for token, value in self.rivals
                ],
            }
        ]
        has = self.has_logprobs and body.get("logprobs")
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": self.text},
            "logprobs": {"content": steps} if has else None,
        }
        return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}, {}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Endpoint)
        with server.lock:
            server.bodies.append(body)
            server.tokens.append(self.headers.get("Authorization"))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            status, answer, headers = server.answer(body)
        if server.gate is not None:
            server.gate.wait(timeout=600)
        with server.lock:
            server.at_once -= 1
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def endpoint():
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def judge(endpoint, **changes):
    settings: dict[str, Any] = {"base_url": endpoint.url, "model": "m", "max_retries": 2}
    return APIJudge(**(settings | changes))


def test_a_probability_sums_the_ways_to_write_the_answer(endpoint):
    asked = judge(endpoint)
    assert asked.has_probabilities
    found = asked.answer_probabilities([Question("Is it red?", (PICTURE,))] * 2, ["Yes", "no"])
    assert found == pytest.approx([0.625, 0.25])


def test_an_answer_outside_of_the_rivals_has_probability_zero(endpoint):
    assert judge(endpoint).answer_probabilities([Question("How many?", (PICTURE,))], ["seven"]) == [0.0]


def test_a_request_holds_the_pictures_without_loss_then_the_text(endpoint):
    judge(endpoint, extra_body={"enable_thinking": False}, top_logprobs=7).replies(
        [Question("Which is better?", (PICTURE, PICTURE.rotate(90)))], max_tokens=9
    )
    body = endpoint.bodies[-1]
    first, second, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which is better?"}
    for part, picture in ((first, PICTURE), (second, PICTURE.rotate(90))):
        header, _, data = part["image_url"]["url"].partition(",")
        assert header == "data:image/png;base64"
        assert np.array_equal(np.asarray(Image.open(BytesIO(base64.b64decode(data)))), np.asarray(picture))
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0.0)
    assert (body["logprobs"], body["top_logprobs"], body["enable_thinking"]) == (True, 7, False)


def test_a_reply_carries_the_probabilities_of_its_tokens(endpoint):
    (reply,) = judge(endpoint).replies([Question("Is it red?", (PICTURE,))], max_tokens=1)
    assert isinstance(reply, Reply) and reply.text == "Yes"
    assert reply.steps[0].token == "Yes"
    assert reply.steps[0].probabilities == pytest.approx({"Yes": 0.5, " yes": 0.125, "No": 0.25})


@pytest.mark.parametrize("manner", ["gives none", "refuses"])
def test_without_log_probabilities_text_is_read_and_the_start_says_so(endpoint, manner, caplog):
    endpoint.has_logprobs = False
    endpoint.refuses_logprobs = manner == "refuses"
    asked = judge(endpoint)
    assert not asked.has_probabilities
    assert "m at http://127.0.0.1" in caplog.text and "gives no log-probabilities" in caplog.text
    question = Question("Is it red?", (PICTURE,))
    assert asked.answer_probabilities([question, question], ["Yes", "no"]) == [1.0, 0.0]
    assert "logprobs" not in endpoint.bodies[-1]
    endpoint.text = "That depends."
    (found,) = asked.answer_probabilities([question], ["Yes"])
    assert isinstance(found, JudgeError) and "That depends." in str(found)


def test_log_probabilities_can_be_required(endpoint):
    endpoint.has_logprobs = False
    with pytest.raises(ConfigError, match="gives no log-probabilities .*its answer had none.*set logprobs to auto"):
        judge(endpoint, logprobs="required")


def test_never_asking_for_them_is_not_warned_of(endpoint, caplog):
    assert not judge(endpoint, logprobs="never").has_probabilities
    assert caplog.text == ""


def test_passing_failures_are_tried_again(endpoint):
    asked = judge(endpoint)
    endpoint.failures = [(503, {"Retry-After-Ms": "1"}), (429, {"Retry-After-Ms": "1"})]
    assert asked.answer_probabilities([Question("Is it red?", (PICTURE,))], ["Yes"]) == pytest.approx([0.625])
    assert len(endpoint.bodies) == 4


def test_a_question_that_keeps_failing_fails_alone_and_says_why(endpoint):
    asked = judge(endpoint, concurrency=1, max_retries=0)
    endpoint.failures = [(500, {}), (422, {})]
    first, second, third = asked.answer_probabilities([Question("Is it red?", (PICTURE,))] * 3, ["Yes"] * 3)
    assert isinstance(first, JudgeError) and "failure 500" in str(first)
    assert isinstance(second, JudgeError) and "failure 422" in str(second)
    assert third == pytest.approx(0.625)


def test_a_refused_request_is_not_repeated(endpoint):
    asked = judge(endpoint)
    endpoint.failures = [(422, {})]
    asked.replies([Question("Is it red?", (PICTURE,))], max_tokens=1)
    assert len(endpoint.bodies) == 2


def test_requests_run_at_once_up_to_the_bound(endpoint):
    asked = judge(endpoint, concurrency=3)
    endpoint.gate = threading.Barrier(3)  # answers none before three are there
    asked.answer_probabilities([Question("Is it red?", (PICTURE,))] * 6, ["Yes"] * 6)
    assert endpoint.most_at_once == 3
    assert Counter(body["messages"][0]["content"][1]["text"] for body in endpoint.bodies)["Is it red?"] == 6


def test_the_token_comes_from_a_file(endpoint, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    judge(endpoint, api_key_file=str(tmp_path / "key"))
    assert endpoint.tokens == ["Bearer secret"]


def test_a_wrong_token_fails_at_the_start(endpoint):
    endpoint.failures = [(401, {})]
    with pytest.raises(ConfigError, match="does not answer a question about an image: .*failure 401.*api_key_file"):
        judge(endpoint)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs": "maybe"}, "logprobs = 'maybe' must be one of"),
        ({"concurrency": 0}, "concurrency = 0 must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s = 0.0 must be above 0"),
        ({"base_url": "localhost:8000"}, "base_url = 'localhost:8000' must start with"),
        ({"api_key_file": "/no/key"}, "cannot read api_key_file '/no/key'"),
        ({"base_url": "http://127.0.0.1:9", "max_retries": 0}, "at http://127.0.0.1:9 does not answer"),
    ],
)
def test_impossible_arguments_say_what_to_change(endpoint, changes, text):
    with pytest.raises(ConfigError, match=text):
        judge(endpoint, **changes)
