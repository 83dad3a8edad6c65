"""The package as a stranger meets it: what importing it costs, and whether its README runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).parents[1]


def readme_example(heading: str) -> str:
    """The first Python block below a heading."""
    section = (PACKAGE / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block.group(1)


def test_cold_import_pulls_in_nothing_but_torch():
    """What importing every module but the diffusers one adds to an interpreter that has imported torch."""
    modules = sorted(
        path.stem
        for path in (PACKAGE / "src/unirl/sde").glob("*.py")
        if path.stem not in ("__init__", "diffusers_scheduler")
    )
    code = (
        "import importlib, sys, torch\nbefore = set(sys.modules)\nimport unirl.sde\n"
        f"[importlib.import_module('unirl.sde.' + name) for name in {modules!r}]\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    allowed = {"unirl", "torch", "numpy"} | set(sys.stdlib_module_names)
    assert set(result.stdout.split()) - allowed == set()


SEEDED = """
import torch
from unirl.sde.noise import initial_noise, keyed_permutation, keyed_uniform, step_noise
from unirl.sde.windows import MixGRPOWindow, RandomSubset
torch.manual_seed(torch.seed())
keys, shape = ["r0:prompt:1:sample:0", "r0:prompt:1:sample:1"], (4, 8, 8)
noise = torch.cat([initial_noise(keys, 1, shape), step_noise(keys, 2, 1, shape), keyed_uniform(keys, 1, shape)])
print(noise.view(torch.int32).long().sum().item(), noise.flatten()[::97].tolist())
print(keyed_permutation("a", 0, 20).tolist())
for each in (MixGRPOWindow(25, strategy="random", iters_per_window=3), RandomSubset(30, 4)):
    print([each.indices(rollout) for rollout in range(40)])
"""


def test_noise_and_random_windows_are_the_same_in_another_process(capsys):
    result = subprocess.run([sys.executable, "-c", SEEDED], capture_output=True, text=True, timeout=600, check=True)
    exec(SEEDED, {})
    assert capsys.readouterr().out == result.stdout
    assert len(result.stdout.splitlines()) == 4


def test_the_namespace_has_no_init_file():
    assert not (PACKAGE / "src/unirl/__init__.py").exists()


def test_everything_named_public_exists():
    import unirl.sde

    assert all(hasattr(unirl.sde, name) for name in unirl.sde.__all__)


def test_readme_example_for_a_strangers_project_runs_at_ratio_one():
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(readme_example("In your own project"), names)
    # 36 rows at replay against 4 while sampling: equal to rounding.
    torch.testing.assert_close(names["ratio"], torch.ones(36), rtol=0, atol=1e-5)
    assert names["model"].weight.grad.abs().sum() > 0


def test_readme_example_of_ddim_runs():
    names: dict[str, Any] = {}
    exec(readme_example("Epsilon- and v-prediction: DDIM"), names)
    assert torch.isfinite(names["ddpo"]).all() and names["trajectory"].sde_logp.shape == (2, 19)


def test_readme_example_runs_in_a_stock_pipeline(monkeypatch, capsys):
    diffusers: Any = pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    from .tiny_sd3 import tiny_sd3

    def from_pretrained(name: str, torch_dtype: torch.dtype) -> Any:
        """Stands for the download: the same class with the same parts, tiny, random and in the dtype asked for."""
        return tiny_sd3().to(dtype=torch_dtype)

    monkeypatch.setattr(diffusers.StableDiffusion3Pipeline, "from_pretrained", from_pretrained)
    example = readme_example("In a diffusers pipeline").replace("height=512, width=512", "height=8, width=8")
    names: dict[str, Any] = {}
    exec(example, names)
    assert len(names["images"]) == 2
    assert names["trajectory"].sde_logp.shape == (2, 3)
    assert names["trajectory"].indices == [0, 1, 2, 3, 10]
    assert names["trajectory"].latents.dtype == torch.bfloat16
    assert "torch.Size([2, 3])" in capsys.readouterr().out
