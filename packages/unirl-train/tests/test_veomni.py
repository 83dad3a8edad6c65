"""VeOmniBackend passes the contract suite of FSDPBackend, computes its bits, and refuses what it is not tested with."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import results_of_ranks
from train_fakes import TinyBundle
from veomni_steps import CASES, steps_of_both

from unirl.train.backend.veomni import VeOmniBackend, shard_by_veomni
from unirl.train.backend.veomni_rules import VEOMNI_VERSION
from unirl.train.backend.wrap import Divided
from unirl.train.configs import FSDPConfig, TrainTopology
from unirl.types.errors import ConfigError
from unirl.types.training import OptimizerConfig

FOLDER = Path(__file__).parent
ROOT = Path(__file__).parents[3]
CONTRACT = [
    *(FOLDER / f"test_{name}.py" for name in ("backend", "backend_distributed", "auxiliary", "checkpoint")),
    *(ROOT / "tests" / "families" / f"test_{name}.py" for name in ("build_order", "topologies")),
]
"""What runs on the backend that tested_backend.py names."""
with_veomni = [
    pytest.mark.veomni,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("veomni") is None, reason="needs uv sync --extra veomni"),
]


@pytest.mark.parametrize("file", [pytest.param(path, id=path.stem, marks=with_veomni) for path in CONTRACT])
def test_veomni_passes_the_contract_suite(file: Path) -> None:
    name = f"{VeOmniBackend.__module__}.{VeOmniBackend.__name__}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", str(file)],
        cwd=ROOT,
        env={**os.environ, "UNIRL_TESTED_BACKEND": name},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two-ranks")
    return results_of_ranks(partial(steps_of_both, folder), folder)


@pytest.mark.parametrize("case", [pytest.param(case, marks=with_veomni) for case in CASES])
def test_gradients_steps_copies_and_pushed_shards_have_the_bits_of_fsdp_backend(case: str, ranks: list[dict]) -> None:
    assert [rank[case] for rank in ranks] == [[], []]


@pytest.mark.parametrize("way", [pytest.param(f"{way} by VeOmni's", marks=with_veomni) for way in ("saved", "loaded")])
def test_a_checkpoint_of_one_backend_resumes_bit_for_bit_with_the_other(way: str, ranks: list[dict]) -> None:
    assert [rank[way] for rank in ranks] == [[], []]


@pytest.mark.parametrize("number", [pytest.param(number, marks=with_veomni) for number in range(2)])
def test_the_gradient_norm_is_veomnis(number: int, ranks: list[dict]) -> None:
    ours, veomnis = ranks[number]["norms"]
    assert ours == pytest.approx(veomnis, rel=1e-6)  # float32 squares in another order


@pytest.mark.parametrize("device", [pytest.param("meta", marks=with_veomni)])
def test_a_device_that_veomni_would_not_take_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="VeOmni takes the (cpu|cuda) of this machine, but device is meta"):
        shard_by_veomni({}, {}, Divided(), topology=TrainTopology(), config=FSDPConfig(), device=torch.device(device))


@pytest.mark.parametrize("version", ["0.1.11", "0.2.0"])
def test_a_version_that_is_not_tested_is_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / f"veomni-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: veomni\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"VeOmni {version} is installed, .* tested with {VEOMNI_VERSION} alone"):
        VeOmniBackend(TinyBundle(), optimizer=OptimizerConfig(learning_rate=1e-2))
