"""A judge behind any OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, a vendor's API."""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeVar

from PIL import Image
from torch import nn

from unirl.reward.local.judges.answers import surface_forms, written_probability
from unirl.reward.local.judges.judge import JudgeError, Question, Reply, Step
from unirl.types.bounds import NonNegativeInt, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError, as_sentence
from unirl.types.urls import without_credentials

LogProbs = Literal["auto", "required", "never"]
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)
_PROBE = Question("Is this picture black? Answer in one word.", (Image.new("RGB", (32, 32)),))


@bounded("judge")
class APIJudge:
    """Asks `model` at `base_url` with chat completions, greedily, images as PNG data URLs.

    base_url: up to and with the version, "http://host:8000/v1". model: as the endpoint calls it.
    api_key_file: file that holds the bearer token; None for an endpoint that needs none.
    logprobs: "auto" uses the log-probabilities of tokens where the endpoint gives them and otherwise reads answers from
    text, with a warning at the start; "required" refuses an endpoint without; "never" always reads text.
    top_logprobs: rivals a token comes with. Of an answer outside of them the probability counts as 0, so
    `answer_probabilities` is a lower bound; 20 is what most endpoints allow.
    concurrency: requests at once. timeout_s: of one request. max_retries: of a request that failed for want of a
    connection, by time-out, 408, 409, 429 or 5xx, with exponential backoff and jitter (the openai package).
    extra_body: more fields of the request, such as {"enable_thinking": false}.
    The constructor asks one question, so that a wrong address, token or model fails before anything expensive.
    Raises ConfigError for these and for impossible values, ImportError without the openai package. Extra `judge`.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key_file: str | None = None,
        logprobs: LogProbs = "auto",
        top_logprobs: PositiveInt = 20,
        concurrency: PositiveInt = 16,
        timeout_s: Positive = 60.0,
        max_retries: NonNegativeInt = 4,
        extra_body: dict[str, Any] | None = None,  # Any: JSON of the endpoint
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"judge {model}: base_url = {without_credentials(base_url)!r} must start with http:// or https://"
            )
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ImportError(
                f"judge {model} needs the openai package. Install it with: pip install 'unirl-reward[judge]'"
            ) from error
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=base_url,
            api_key="none" if api_key_file is None else _key(api_key_file, model),
            timeout=timeout_s,
            max_retries=max_retries,
        )
        self.base_url = without_credentials(base_url)  # the one that messages name
        self.model = model
        self.top_logprobs = top_logprobs
        self.concurrency = concurrency
        self._extra_body = extra_body
        self._has_probabilities = logprobs != "never"
        self._check(logprobs)

    @property
    def has_probabilities(self) -> bool:
        """True if the endpoint gives log-probabilities and may use them."""
        return self._has_probabilities

    def modules(self) -> list[nn.Module]:
        """None: the model is elsewhere."""
        return []

    def answer_probabilities(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float | JudgeError]:
        """P(answer) from the first token's log-probabilities, or 0 and 1 from the text where there are none."""
        if len(questions) != len(answers):
            raise ContractError(f"{len(questions)} questions cannot have {len(answers)} expected answers")

        def probability(question: Question, answer: str) -> float:
            if not self._has_probabilities:
                return written_probability(self._ask(question, max_tokens=8).text, answer)
            reply = self._ask(question, max_tokens=1)
            if not reply.steps:
                raise JudgeError(f"judge {self.model} gave no log-probabilities with {reply.text!r}")
            forms = surface_forms(answer)
            return sum(value for token, value in reply.steps[0].probabilities.items() if token in forms)

        return self._each(probability, questions, answers)

    def replies(self, questions: Sequence[Question], max_tokens: int) -> list[Reply | JudgeError]:
        """Replies with their tokens' probabilities where the endpoint gives them."""
        return self._each(lambda question, _: self._ask(question, max_tokens), questions, [""] * len(questions))

    def _each(
        self, ask: Callable[[Question, str], _Answer], questions: Sequence[Question], answers: Sequence[str]
    ) -> list[_Answer | JudgeError]:
        def asked(question: Question, answer: str) -> _Answer | JudgeError:
            try:
                return ask(question, answer)
            except JudgeError as error:
                return error

        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            return list(pool.map(asked, questions, answers))

    def _ask(self, question: Question, max_tokens: int) -> Reply:
        """One reply. Raises JudgeError if the endpoint gives none."""
        try:
            return self._completion(question, max_tokens)
        except self._openai.OpenAIError as error:
            raise JudgeError(f"judge {self.model} at {self.base_url}: {type(error).__name__}: {error}") from error

    def _completion(self, question: Question, max_tokens: int) -> Reply:
        pictures = [{"type": "image_url", "image_url": {"url": _data_url(picture)}} for picture in question.pictures]
        probabilities = {"logprobs": True, "top_logprobs": self.top_logprobs} if self._has_probabilities else {}
        messages = [{"role": "user", "content": [*pictures, {"type": "text", "text": question.text}]}]
        body: dict[str, Any] = {"messages": messages, **probabilities}  # Any: the openai package types every field
        found = self._client.chat.completions.create(
            model=self.model, max_tokens=max_tokens, temperature=0.0, extra_body=self._extra_body, **body
        )
        if not found.choices or found.choices[0].message.content is None:
            raise JudgeError(f"judge {self.model} at {self.base_url} gave a completion without text")
        choice = found.choices[0]
        steps = choice.logprobs.content if choice.logprobs is not None and choice.logprobs.content else []
        return Reply(
            text=choice.message.content or "",
            steps=tuple(Step(step.token, _probabilities(step.top_logprobs)) for step in steps),
        )

    def _check(self, logprobs: LogProbs) -> None:
        """One question to the endpoint. Raises ConfigError if it cannot be used as asked."""
        reason = ""
        if self._has_probabilities:
            try:
                if self._completion(_PROBE, max_tokens=1).steps:
                    return
                reason = "its answer had none"
            except self._openai.BadRequestError as error:
                reason = f"it refused to: {error}"
            except (self._openai.OpenAIError, JudgeError) as error:
                raise self._silent(error) from error
        if logprobs == "required":
            raise ConfigError(
                f"judge {self.model} at {self.base_url} gives no log-probabilities ({reason}). Lower top_logprobs = "
                f"{self.top_logprobs} if it allows fewer, or set logprobs to auto or never to read answers from text."
            )
        self._has_probabilities = False
        try:
            self._completion(_PROBE, max_tokens=1)
        except (self._openai.OpenAIError, JudgeError) as error:
            raise self._silent(error) from error
        if logprobs == "auto":
            _log.warning(
                "judge %s at %s gives no log-probabilities (%s): answers are read from text, 0 or 1",
                self.model,
                self.base_url,
                reason,
            )

    def _silent(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"judge {self.model} at {self.base_url} does not answer a question about an image: {as_sentence(error)} "
            "Check base_url, model and api_key_file, and that the model sees images and does not think first "
            "(extra_body)."
        )


def _key(file: str, model: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"judge {model}: cannot read api_key_file {file!r}: {error}") from error
    if not key:
        raise ConfigError(f"judge {model}: api_key_file {file!r} is empty")
    return key


def _data_url(picture: Image.Image) -> str:
    buffer = BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _probabilities(rivals: Sequence[Any]) -> dict[str, float]:  # Any: the openai package's type is not imported here
    """Probability by token; tokens of the same text (vLLM shows some so) add up."""
    found: dict[str, float] = {}
    for rival in rivals:
        found[rival.token] = found.get(rival.token, 0.0) + math.exp(rival.logprob)
    return found
