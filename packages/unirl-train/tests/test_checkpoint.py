"""Checkpoints of one process: bit-identical resume, damage, a full disk, retention."""

import errno
import json
import logging
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from train_fakes import TinyBundle, lora_config, make_backend, snapshot, train_step

from unirl.train import small_states
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.state import COUNTERS
from unirl.train.checkpoint import saved
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.checkpoint.folder import meant_step
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, LrSchedulerConfig, OptimizerConfig
from unirl.types.errors import CheckpointError, ConfigError, ContractError

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": lora_config()},
    "bf16": {"fsdp": FSDPConfig(param_dtype="bf16")},
    "8bit": {"optimizer": OptimizerConfig(1e-2, states="8bit")},
    "rounded": {
        "optimizer": OptimizerConfig(1e-2, states="bf16"),
        "fsdp": FSDPConfig(param_dtype="bf16", master_dtype="bf16"),
    },
}


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.mtrand.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[float]:
    return [random.random(), float(numpy.random.mtrand.random_sample()), float(torch.rand(()))]


def start(options: dict[str, Any]) -> tuple[FSDPBackend, TinyBundle]:
    bundle = TinyBundle()
    schedule = LrSchedulerConfig("cosine", warmup_steps=2, total_steps=10)
    backend = make_backend(bundle, ema=EMAConfig(every=2), scheduler=schedule, **options)
    backend.keep_policy("old")
    return backend, bundle


def steps(backend: FSDPBackend, bundle: TinyBundle, which: range) -> list[float]:
    drawn = []
    for step in which:
        train_step(backend, bundle.model, step)
        backend.update_policy("old", 0.5)
        drawn += draws()
    return drawn


def assert_equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_what_only_reads_a_checkpoint_says_that_it_was_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpointer = Checkpointer(start({})[0], str(tmp_path))
    checkpointer.save(3, {})
    with caplog.at_level(logging.INFO, "unirl.train"):
        checkpointer.load()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("unirl")]
    assert said == [f"loaded {tmp_path / 'step-000003'}"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_two_steps_a_resume_and_two_steps_equal_four_steps_bit_for_bit(
    kind: str, is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(small_states, "SMALLEST_SIZE", 1)
    monkeypatch.setattr(small_states, "SMALLEST_BLOCK", 8)
    seed_all(7)
    backend, bundle = start(OPTIONS[kind])
    assert any(name.endswith("_scale") for name in backend.state_dict()) == (kind == "8bit")
    steps(backend, bundle, range(2))
    checkpointer = Checkpointer(backend, str(tmp_path), is_async=is_async)
    checkpointer.save(2, {"next_rollout": 2, "config": {"lr": 0.1}}, 0.5)
    drawn = steps(backend, bundle, range(2, 4))
    checkpointer.wait()
    expected = snapshot(backend)
    backend.close()

    seed_all(99)
    resumed, bundle = start(OPTIONS[kind])
    steps(resumed, bundle, range(5, 6))
    assert Checkpointer(resumed, str(tmp_path)).load() == {"next_rollout": 2, "config": {"lr": 0.1}}
    assert resumed.progress.num_optimizer_steps == 2
    assert steps(resumed, bundle, range(2, 4)) == drawn
    assert_equal_states(snapshot(resumed), expected)
    resumed.close()


def saved_run(folder: Path, num_saves: int = 2, **options: Any) -> tuple[FSDPBackend, TinyBundle, Checkpointer]:
    backend, bundle = start({})
    checkpointer = Checkpointer(backend, str(folder), **options)
    for step in range(1, num_saves + 1):
        train_step(backend, bundle.model, step)
        checkpointer.save(step, {"step": step})
    return backend, bundle, checkpointer


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "missing"])
@pytest.mark.parametrize(
    "file",
    ["state/__0_0.distcp", "state/.metadata", "rng-00000.safetensors", "driver_state.json", "manifest.json"],
)
def test_a_damaged_file_is_named_and_the_last_good_checkpoint_is_used(
    file: str, damage: Any, sound_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(sound_run, tmp_path / "run")
    damage(tmp_path / "run" / "step-000002" / file)
    backend, _ = start({})
    with caplog.at_level(logging.WARNING):
        assert Checkpointer(backend, str(tmp_path / "run")).load() == {"step": 1}
    assert "step-000002" in caplog.text and file in caplog.text


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    saved_run(folder)
    return folder


def test_when_no_checkpoint_is_sound_each_is_listed_with_its_reason(tmp_path: Path):
    backend, _, checkpointer = saved_run(tmp_path)
    truncate(tmp_path / "step-000001" / "driver_state.json")
    (tmp_path / "step-000002" / "architecture.json").unlink()
    before = snapshot(backend)
    with pytest.raises(CheckpointError, match=r"step-000002: architecture.json is missing; step-000001: driver_state"):
        checkpointer.load()
    assert_equal_states(snapshot(backend), before)


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path):
    _, _, checkpointer = saved_run(tmp_path)
    assert checkpointer.load(1) == {"step": 1}
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 .*steps there: 1, 2"):
        checkpointer.load(9)


def test_an_empty_folder_says_that_there_is_no_checkpoint(tmp_path: Path):
    backend, _ = start({})
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Checkpointer(backend, str(tmp_path / "nothing")).load()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_no_rest(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backend, bundle, checkpointer = saved_run(tmp_path, num_saves=1, is_async=is_async)
    checkpointer.wait()

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(saved, "write_rng_state", no_space)
        train_step(backend, bundle.model, 2)
        with pytest.raises(
            CheckpointError,
            match=r"^The disk of .* is full; earlier.*resume=auto\. .*No space left.*Free bytes there: \d+",
        ):
            checkpointer.save(2, {"step": 2})
            checkpointer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]
    assert checkpointer.load() == {"step": 1}


# Bytes a file may have: less than the generators take, and enough for them but not for the tensors.
@pytest.mark.parametrize("limit_bytes", [7_000, 30_000])
def test_a_write_that_the_system_cuts_short_leaves_the_last_good_checkpoint(limit_bytes: int, tmp_path: Path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    backend, bundle, checkpointer = saved_run(tmp_path, num_saves=1)
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old_limit[1]))
        with pytest.raises(CheckpointError, match=r"step-000002.*Free bytes"):
            checkpointer.save(2, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]
    assert checkpointer.load() == {"step": 1}


def test_the_rest_of_a_crash_is_ignored_by_load_and_removed_by_the_next_run(tmp_path: Path):
    backend, _, _ = saved_run(tmp_path, num_saves=1)
    rest = tmp_path / "step-000002.tmp-0123abcd"
    rest.mkdir()
    (rest / "driver_state.json").write_text("{")
    checkpointer = Checkpointer(backend, str(tmp_path))
    assert checkpointer.load() == {"step": 1}
    assert rest.exists()  # readers, such as an export, may run while a run writes
    checkpointer.remove_unfinished()
    assert not rest.exists()


def test_a_changed_architecture_names_the_parameters_with_both_shapes(tmp_path: Path):
    saved_run(tmp_path, num_saves=1)
    wider = make_backend(TinyBundle(width=12))
    with pytest.raises(CheckpointError, match=r"transformer.proj_in.weight: saved \[8, 8\].*here \[12, 12\]"):
        Checkpointer(wider, str(tmp_path)).load()
    adapted = make_backend(lora=LoraConfig(rank=2, alpha=2.0))
    with pytest.raises(CheckpointError, match="another model"):
        Checkpointer(adapted, str(tmp_path)).load()


def test_another_lora_scale_is_refused_although_the_tensors_fit(tmp_path: Path):
    Checkpointer(make_backend(lora=LoraConfig(rank=2, alpha=2.0)), str(tmp_path)).save(1, {})
    with pytest.raises(CheckpointError, match=r"= 1.0, here it is 2.0"):
        Checkpointer(make_backend(lora=LoraConfig(rank=2, alpha=4.0)), str(tmp_path)).load()


def test_a_thread_that_dies_of_a_fault_of_ours_is_not_taken_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    backend, _ = start({})
    checkpointer = Checkpointer(backend, str(tmp_path), is_async=True)

    def fault(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(saved, "write_rng_state", fault)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    checkpointer.save(1, {})
    with pytest.raises(CheckpointError, match="checkpoint-1 ended without being written"):
        checkpointer.wait()


def test_resuming_without_the_moving_average_that_was_saved_is_refused(tmp_path: Path):
    saved_run(tmp_path, num_saves=1)
    with pytest.raises(CheckpointError, match="have no place.*ema/"):
        Checkpointer(make_backend(), str(tmp_path)).load()


def test_policies_that_were_saved_come_back_by_name(tmp_path: Path):
    backend, _, _ = saved_run(tmp_path, num_saves=1)
    fresh = make_backend(ema=EMAConfig())
    Checkpointer(fresh, str(tmp_path)).load()
    assert fresh.policy_names == ("old",)
    assert_equal_states(snapshot(fresh), snapshot(backend))


def test_the_newest_and_the_best_stay(tmp_path: Path):
    backend, _ = start({})
    checkpointer = Checkpointer(backend, str(tmp_path), keep_last=2)
    for step, score in enumerate([0.1, 0.9, 0.3, None, float("nan"), 0.9]):
        checkpointer.save(step, {"step": step}, score)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000004", "step-000005"]
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 1
    assert checkpointer.load(1) == {"step": 1}
    assert [meant_step(tmp_path, which) for which in ("newest", "best", "4")] == [5, 1, 4]
    for which, message in (("3", "no checkpoint of step 3; it has 1, 4, 5"), ("last", "must be newest, best or")):
        with pytest.raises(ConfigError, match=message):
            meant_step(tmp_path, which)


def test_without_a_score_there_is_no_best(tmp_path: Path):
    backend, _ = start({})
    checkpointer = Checkpointer(backend, str(tmp_path))
    checkpointer.save(1, {"step": 1})
    with pytest.raises(ConfigError, match="has a held-out score"):
        meant_step(tmp_path, "best")


def test_without_keep_best_only_the_newest_stay(tmp_path: Path):
    backend, _ = start({})
    checkpointer = Checkpointer(backend, str(tmp_path), keep_last=1, keep_best=False)
    for step, score in enumerate([0.9, 0.1]):
        checkpointer.save(step, {}, score)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_step_that_is_saved_again_replaces_the_earlier_one(tmp_path: Path):
    _, _, checkpointer = saved_run(tmp_path, num_saves=1)
    checkpointer.save(1, {"step": "again"})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpointer.load() == {"step": "again"}
    # A crash between the two renames leaves only the one that was being replaced.
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.replaced-0a")
    assert checkpointer.load() == {"step": "again"}


def test_a_driver_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path):
    backend, _ = start({})
    with pytest.raises(ContractError, match="not JSON"):
        Checkpointer(backend, str(tmp_path)).save(1, {"tensor": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_save_holds_the_values_of_its_own_moment(tmp_path: Path):
    backend, bundle = start({})
    checkpointer = Checkpointer(backend, str(tmp_path), is_async=True)
    expected = snapshot(backend)
    checkpointer.save(0, {})
    steps(backend, bundle, range(3))
    checkpointer.load()
    assert backend.policy_version == 4  # three steps, then weights of old under their own version
    expected["counters"][COUNTERS.index("policy_version")] = 4
    assert_equal_states(snapshot(backend), expected)
