"""What is kept of samples per token and denoising step: the numbers of training, and training as without it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_fakes import rollout, setup, some_advantages
from test_text_trainer import Run

from unirl.algorithms import traces
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.tracking.sample_files import SampleFiles


def trained(samples: list[str] | None, **options: Any) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The response, traces and weights after training on it in two updates, whose first moves the policy."""
    made = setup(DiffusionGRPO, updates=2, micro=2, lr=0.05, **options)
    resp = rollout(made.pipeline)
    track = resp.root_track()
    track.advantages = some_advantages(track.batch_size)
    if samples is not None:
        made.stack.trace(samples)
    made.stack.train(resp, progress=0.0)
    weights = {name: value.clone() for name, value in made.pipeline.model.state_dict().items()}
    return resp, made.stack.take_traces(), weights


@pytest.mark.parametrize("options", [{}, {"rows_per_forward": 1}])
def test_steps_of_the_named_samples_have_both_log_probs(options: dict[str, Any]):
    resp, _, plain = trained(None, **options)
    track = resp.root_track()
    chosen = [track.sample_ids[0], track.sample_ids[-1]]
    _, found, weights = trained(chosen, **options)
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert {trace["sample_id"] for trace in found} == set(chosen)
    for trace in found:
        row = track.sample_ids.index(trace["sample_id"])
        assert trace["steps"] == track.segment.sde_indices
        assert trace["logp"] == pytest.approx(track.segment.sde_logp[row].tolist(), rel=1e-6)
        gap = max(abs(own - given) for own, given in zip(trace["trained_logp"], trace["logp"], strict=True))
        # The first update trains on the policy that sampled, the second on one that has moved.
        assert gap < 1e-6 if trace["update"] == 0 else gap > 1e-5
    assert {trace["update"] for trace in found} == {0, 1}


def test_no_trace_is_kept_longer_than_its_rollout():
    made = setup(DiffusionGRPO)
    made.stack.trace(["a"])
    assert made.stack.take_traces() == made.stack.take_traces() == []


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_writes_traces_of_the_tokens_that_it_recorded_and_trains_the_same(tmp_path: Path):
    plain, seen = Run(tmp_path / "plain", num_rollouts=2), Run(tmp_path / "seen", num_rollouts=2, media_interval=1)
    plain.trainer.run()
    seen.trainer.run()
    for name, value in plain.weights.items():
        assert torch.equal(value, seen.weights[name])
    folder = tmp_path / "seen" / "samples"
    records = {line["sample_id"]: line for line in lines(folder / "rollout-000002.jsonl")}
    found = lines(folder / "rollout-000002" / "traces.jsonl")
    assert {trace["sample_id"] for trace in found} == set(records)
    for trace in found:
        record = records[trace["sample_id"]]
        assert len(trace["tokens"]) == len(trace["texts"]) == record["media"]["num_tokens"]
        assert "".join(trace["texts"]) == record["media"]["text"]
        assert all(value is not None and value <= 0 for value in trace["logp"])
        if trace["update"] == 0:
            assert trace["trained_logp"] == pytest.approx(trace["logp"], abs=1e-5)


def test_long_texts_have_traces_of_their_first_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traces, "MAX_TOKENS", 1)
    Run(tmp_path, num_rollouts=1, media_interval=1).trainer.run()
    found = lines(tmp_path / "samples" / "rollout-000001" / "traces.jsonl")
    assert found and all(len(trace[name]) == 1 for trace in found for name in ("tokens", "texts", "logp"))


def test_what_is_not_finite_is_null():
    assert traces._numbers(torch.tensor([1.5, math.nan, -math.inf])) == [1.5, None, None]


def test_traces_go_with_the_records_of_their_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files = SampleFiles(tmp_path)
    files.write_traces("rollout", 1, [{"sample_id": "a"}])
    assert not list(tmp_path.iterdir())
    files.write("rollout", 1, [])
    files.write_traces("rollout", 1, [{"sample_id": "a"}])
    assert lines(tmp_path / "rollout-000001" / "traces.jsonl") == [{"version": 1, "sample_id": "a"}]
    SampleFiles(tmp_path).start(None)
    assert not list(tmp_path.iterdir())
    files.write("rollout", 1, [])
    (tmp_path / "rollout-000001").write_text("in the way", encoding="utf-8")
    files.write_traces("rollout", 1, [{"sample_id": "a"}])
    assert "continues without them" in caplog.text
