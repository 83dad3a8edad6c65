"""Real components on a device that counts: what is there while each of them works, and the most that ever is."""

import threading
from typing import Any

import pytest

from unirl.config.runs import run_of
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.worker import build_components

ALL = ["sleep_engine", "offload_weights", "offload_optimizer", "offload_reward"]
REWARD_BYTES = 5_000_000
"""Stands for a reward model: the scorer of shapes is a rule and has none."""


class CountedDevice:
    """Stands for a device: the bytes of what is on it, the most that ever were, and who was there at each call."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.there: set[str] = set()
        self.peak_bytes = 0
        self.calls: list[tuple[str, frozenset[str]]] = []

    def put(self, name: str, num_bytes: int) -> None:
        self.sizes[name] = num_bytes
        self.come(name)

    def come(self, name: str) -> None:
        self.there.add(name)
        self.peak_bytes = max(self.peak_bytes, self.bytes_of(self.there))

    def leave(self, name: str) -> None:
        self.there.remove(name)  # KeyError where it has left already

    def bytes_of(self, names) -> int:
        return sum(self.sizes[name] for name in names)

    def watch(self, component, method: str, *, call: str | None = None, comes: bool = False, names=None) -> None:
        """Count what a method moves, or note who is there while it runs."""
        original = getattr(component, method)

        def watched(*arguments, **keywords):
            if call is not None:
                self.calls.append((call, frozenset(self.there)))
            for name in names or (arguments[0] if call is None else ()):
                (self.come if comes else self.leave)(name)
            return original(*arguments, **keywords)

        setattr(component, method, watched)


def num_bytes(module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


@pytest.fixture
def device():
    return CountedDevice()


def test_each_phase_finds_its_own_on_the_device_and_no_more(recipe, tmp_path, device):
    small = recipe("worlds/shapes/replica", *(f"+residency.{knob}=true" for knob in ALL))

    def build(context):
        built: dict[str, Any] = build_components(run_of(small), str(tmp_path), context)
        engine, backend, reward = built["engine"], built["backend"], built["reward"]
        trained = sum(map(num_bytes, built["bundle"].trainable_modules().values()))
        for name, size in {"engine": trained, "weights": trained, "optimizer": 2 * trained}.items():
            device.put(name, size)
        device.put("reward", REWARD_BYTES)
        device.peak_bytes = 0  # all are there once, before the first phase
        device.watch(engine, "sleep", names=["engine"])
        device.watch(engine, "wake_up", names=["engine"], comes=True)
        device.watch(backend, "offload")
        device.watch(backend, "onload", comes=True)
        device.watch(reward, "offload", names=["reward"])
        device.watch(reward, "onload", names=["reward"], comes=True)
        for call, component, method in (
            ("rollout", engine, "generate"),
            ("reward", reward, "score_track"),
            ("train", built["stack"], "train"),
            ("sync", built["sync"], "push"),
            ("checkpoint", built["checkpointer"], "save"),
        ):
            device.watch(component, method, call=call)
        return built

    with LocalRuntime(build, device="cpu") as runtime:
        trainer = make_trainer(run_of({**small, "eval": None}), runtime, tmp_path, [], threading.Event())
        trainer.run()
    found = dict(device.calls)
    assert len(set(device.calls)) == len(found) + 1, "the canary of a push is the other rollout"
    assert ("rollout", frozenset({"engine", "weights"})) in device.calls  # the canary, which the trainer replays
    assert found == {
        "sync": {"engine", "weights"},
        "rollout": {"engine"},
        "reward": {"engine", "reward"},
        "train": {"weights", "optimizer"},
        "checkpoint": {"weights", "optimizer"},
    }
    allowed = [device.bytes_of(names) for names in found.values()]
    assert device.peak_bytes == max(allowed) < device.bytes_of(device.sizes)
