"""What a replica does with its samples, in this process."""

import dataclasses
import threading

import pytest
import torch

from unirl.reward.base import LocalScorer
from unirl.reward_server import worker
from unirl.reward_server.worker import Judge, prepared
from unirl.types.device_kinds import ACCELERATOR, KINDS

from .fakes import sample


class Fragile(LocalScorer):
    """Fails on a prompt, in a way that `LocalScorer` does not expect of a sample."""

    def score_batch(self, request):
        if "explode" in request.prompts:
            raise AttributeError("of the\nclient's text " + "x" * 5000)
        return torch.ones(len(request.sample_ids))


def test_a_sample_that_cannot_be_scored_is_one_short_line_of_the_log(caplog):
    judge = Judge("r", Fragile(name="r", batch_size=4))
    samples = [sample("a"), sample("b\nINFO forged", prompt="explode"), sample("c")]
    [[first, reason, last]] = judge.found(samples, threading.Event())
    assert first == last == {"reward": 1.0} and str(reason).startswith("AttributeError: of the\nclient's")
    [record] = caplog.records
    line = record.getMessage()
    assert line.startswith("reward r: sample b INFO forged: AttributeError: of the client's text xxx")
    assert line.endswith("test_worker.py)") and "\n" not in line and len(line) < 800 and record.exc_info is None


def test_a_keyword_that_a_base_does_not_take_is_final():
    """ShapesRewardScorer hands its keywords on, so that its own signature takes any."""
    target = "unirl.reward.worlds.shapes_scorer.ShapesRewardScorer"
    start = {
        "name": "a",
        "target": target,
        "params": {"soft_wait": 1},
        "device": "cpu",
        "num_cpus": 1,
        "warm_up": False,
    }
    judge, told = prepared(start)
    assert judge is None and told["is_final"] and told["kind"] == "ConfigError"
    assert told["text"].startswith(f"scorer {target}: ") and "unexpected keyword argument 'soft_wait'" in told["text"]


def test_a_scorer_with_gpus_gets_the_accelerator_of_its_machine(monkeypatch):
    target = "unirl.reward.worlds.shapes_scorer.ShapesRewardScorer"
    start = {"name": "a", "target": target, "params": {}, "num_cpus": 1, "max_concurrency": 1, "warm_up": False}
    placed = []
    monkeypatch.setattr(worker, "built", lambda target, params, device: placed.append(device) or Fragile(name="a"))
    monkeypatch.setattr(worker, "accelerator", lambda: None)
    judge, told = prepared({**start, "device": ACCELERATOR})
    assert judge is None and told["is_final"]
    assert told["text"] == (
        "torch finds no accelerator here. Mend its driver or torch, or set num_gpus: 0 for the CPU."
    )
    monkeypatch.setattr(worker, "accelerator", lambda: KINDS["npu"])
    for device in (ACCELERATOR, "cpu"):
        assert prepared({**start, "device": device})[0] is not None
    assert placed == ["npu", "cpu"]


class Centred(LocalScorer):
    """The mean of an image less that of its group; one prompt is refused."""

    is_groupwise = True

    def score_batch(self, request):
        if "explode" in request.prompts:
            raise AttributeError("of a prompt")
        values = request.pixels.mean((1, 2, 3))
        return values - values.mean()


def test_a_group_is_scored_whole_and_fails_whole():
    judge = Judge("r", Centred(name="r", batch_size=2))
    assert judge.card()["is_groupwise"]
    judge.warm_up()
    values = [0, 51, 255]
    group = [dataclasses.replace(sample(value, value=value), group_id="g") for value in values]
    [found] = judge.found(group, threading.Event())
    assert [each["reward"] for each in found if not isinstance(each, str)] == pytest.approx([-0.4, -0.2, 0.6], abs=1e-6)
    [found] = judge.found([*group[:2], dataclasses.replace(group[2], prompt="explode")], threading.Event())
    assert found == ["AttributeError: of a prompt"] * 3
    [found] = judge.found([sample("a"), sample("b")], threading.Event())
    assert all("the request has no group_ids" in str(reason) for reason in found)
