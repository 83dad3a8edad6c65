"""vLLM's process without vLLM: a prompt that vLLM refuses does not end the others of its call."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.served_text.call import Generate
from unirl.rollout.engine.vllm_llm import host

REFUSED = 13


class Engine:
    """Writes each request's last token again, once; refuses prompts with a 13 as vLLM refuses one without its media."""

    model_config = SimpleNamespace(dtype=torch.float32)

    def __init__(self):
        self.waiting = []

    def add_request(self, name, prompt, sampling, lora_request):
        if REFUSED in prompt["prompt_token_ids"]:
            raise ValueError("13 stands for a video, and there is none")
        self.waiting.append((name, prompt["prompt_token_ids"]))

    def step(self):
        waiting, self.waiting = self.waiting, []
        for name, prompt in waiting:
            written = SimpleNamespace(
                token_ids=[prompt[-1]],
                logprobs=[{prompt[-1]: SimpleNamespace(logprob=-1.0)}],
                finish_reason="stop",
            )
            yield SimpleNamespace(request_id=name, prompt_token_ids=prompt, outputs=[written], metrics=None)

    def abort_request(self, names):
        """Nothing is left."""


@pytest.fixture
def generate(monkeypatch, tmp_path):
    vllm = SimpleNamespace(
        EngineArgs=lambda **options: options,
        LLMEngine=SimpleNamespace(from_engine_args=lambda arguments, enable_multiprocessing: Engine()),
        SamplingParams=lambda **options: options,
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=0)),
    )
    monkeypatch.setattr(host, "VLLM", SimpleNamespace(require=lambda: vllm))
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    own = host.EngineHost(Start(str(tmp_path), {"enable_multiprocessing": False}, 0, str(tmp_path)), frozenset())

    def run(prompts):
        steps = own.generate(Generate(0, prompts, list(range(len(prompts))), 1.0, 1.0, 0, 4, [9]))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    return run


def test_a_prompt_that_vllm_refuses_does_not_end_the_others(generate):
    found = generate([[1, 2], [REFUSED, 3], [4]])
    assert found.tokens == [[2], [], [4]] and found.finish_reasons == ["stop", "refused", "stop"]
    assert found.refusals == ["", "13 stands for a video, and there is none", ""]
    assert generate([[1, 2], [5]]).refusals == []
