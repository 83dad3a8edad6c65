"""Each package installs only its own closure: what is importable in its own environment."""

import importlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

PRESENT = {
    "unirl-sde": ["torch", "unirl.sde.kernels"],
    "unirl-reward": ["torch", "numpy", "PIL", "unirl.types.reward", "unirl.reward.service"],
}
ABSENT = {
    "unirl-sde": ["diffusers", "transformers", "ray", "hydra", "peft", "unirl.types", "unirl.train", "unirl.models"],
    "unirl-reward": ["diffusers", "ray", "hydra", "peft", "unirl.sde", "unirl.train", "unirl.models", "unirl.rollout"],
}

PROBE = """
import importlib, sys
found = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    found.append(name)
sys.stdout.write(" ".join(found))
"""


def importable(python: Path, names: list[str]) -> set[str]:
    done = subprocess.run([str(python), "-c", PROBE, *names], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def lend_compiled_torch(site: Path) -> None:
    """Put the compiled modules of this environment's torch next to the same sources there: compiling takes seconds."""
    [ours] = importlib.import_module("torch").__path__
    for cache in Path(ours).rglob("__pycache__"):
        if (beside := site / "torch" / cache.relative_to(ours)).parent.is_dir():
            shutil.copytree(cache, beside)


@pytest.mark.parametrize("package", sorted(PRESENT))
def test_a_package_alone_has_its_own_closure_and_nothing_else(package, uv, tmp_path):
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "env")}
    environment.pop("VIRTUAL_ENV", None)
    subprocess.run(
        [uv, "sync", "--quiet", "--locked", "--no-dev", "--package", package],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=600,
    )
    python = tmp_path / "env" / "bin" / "python"
    [site] = tmp_path.glob("env/lib/python*/site-packages")
    lend_compiled_torch(site)
    assert importable(python, PRESENT[package]) == set(PRESENT[package])
    assert importable(python, ABSENT[package]) == set()


def test_both_engine_extras_are_locked_and_exclude_each_other(uv):
    base = [uv, "export", "--quiet", "--locked", "--no-hashes", "--no-header", "--no-annotate"]
    for extra, engine in (("sglang", "sglang=="), ("vllm", "vllm==")):
        done = subprocess.run([*base, "--extra", extra], cwd=ROOT, capture_output=True, text=True, check=True)
        assert engine in done.stdout
    both = subprocess.run([*base, "--extra", "sglang", "--extra", "vllm"], cwd=ROOT, capture_output=True, text=True)
    assert both.returncode != 0
    assert "conflict" in both.stderr.lower() or "incompatible" in both.stderr.lower()


def test_the_lock_is_up_to_date(uv):
    subprocess.run([uv, "lock", "--check"], cwd=ROOT, check=True, capture_output=True, timeout=600)
