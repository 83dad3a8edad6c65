"""`trainer profile`: what costs most, from a real step and from hand-made events."""

import gzip
import json
from types import SimpleNamespace

import pytest

from unirl.app.main import USER_ERROR, main
from unirl.app.profiling import ADVICE, HOST, KINDS, kind_of_work, largest_costs

SMALL = ("batch_size=4", "sampling.samples_per_prompt=4", "stack.num_updates_per_batch=1")


def event(name, start_us, end_us, self_us=0.0):
    span = SimpleNamespace(start=start_us, end=end_us, elapsed_us=lambda: end_us - start_us)
    return SimpleNamespace(name=name, time_range=span, self_cpu_time_total=self_us, self_device_time_total=self_us)


def test_costs_are_summed_by_phase_and_kind_wherever_an_operator_ran():
    events = [
        event("phase rollout", 0, 1e6),
        event("aten::addmm", 10, 20, 4e5),
        event("aten::mm", 30, 40, 2e5),
        event("aten::gelu", 50, 60, 1e5),
        event("phase train", 1e6, 3e6),
        event("aten::mm", 1.5e6, 1.6e6, 1.5e6),  # a backward pass, whose thread knows no phase
        event("aten::mm", 5e6, 6e6, 9e6),  # after the step
    ]
    costs = largest_costs(events, on_device=False)
    found = [(cost.phase, cost.kind, cost.calls, round(cost.seconds, 3), round(cost.share, 3)) for cost in costs]
    assert found == [
        ("train", "matrix products", 1, 1.5, 0.5),
        ("rollout", "matrix products", 2, 0.6, 0.2),
        ("train", HOST, 0, 0.5, 0.167),
        ("rollout", HOST, 0, 0.3, 0.1),
        ("rollout", "elementwise", 1, 0.1, 0.033),
    ]
    assert costs[1].largest == "aten::addmm"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::addmm", "matrix products"),
        ("aten::native_layer_norm", "normalisation"),
        ("aten::normal_", "random numbers"),
        ("aten::copy_", "copies"),
        ("aten::index_select", "indexing"),
        ("aten::gelu", "elementwise"),
    ],
)
def test_operators_have_kinds_and_every_kind_has_advice(name, kind):
    assert kind_of_work(name) == kind
    assert set(ADVICE) == {*KINDS, "elementwise", HOST}


def test_a_step_is_profiled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "worlds/arithmetic/grpo", *SMALL, "--output", "out", "--warmup", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1. ") and "5. " in text and "trace      out/trace.json.gz" in text
    summary = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert {cost["phase"] for cost in summary["costs"]} >= {"rollout", "reward", "train"}
    assert sum(cost["share"] for cost in summary["costs"]) == pytest.approx(1, abs=0.02)
    with gzip.open(tmp_path / "out" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {"phase rollout", "phase train"} <= {each.get("name") for each in events}
    curve = [each["args"]["bytes"] for each in events if each.get("ph") == "C" and each["name"] == "memory of host"]
    assert len(curve) > 100 and max(curve) > min(curve)


def test_what_bench_does_not_measure_is_not_profiled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "worlds/phrases/both"]) == USER_ERROR
    assert "profile measures" in capsys.readouterr().err
