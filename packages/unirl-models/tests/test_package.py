"""The README runs, and the contract imports without diffusers."""

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from unirl.models.bundle import Bundle
from unirl.types.errors import ContractError

from .tiny_bagel import save_bagel

PACKAGE = Path(__file__).parents[1]


def test_the_readme_example_runs_on_a_tiny_checkpoint(sd3_folder: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), flags=re.DOTALL)
    code = blocks[0]
    for original, tiny in {
        '"stabilityai/stable-diffusion-3.5-medium"': repr(str(sd3_folder)),
        '"cuda"': '"cpu"',
        '"prompts.cache"': repr(str(tmp_path)),
        "height=512, width=512": "height=32, width=32",
    }.items():
        assert original in code
        code = code.replace(original, tiny)
    names: dict[str, Any] = {}  # Any: what the example defines
    exec(code, names)  # the example is the test
    assert names["gap"] < 1e-2  # bf16, other rows than the rollout


def test_the_readme_example_of_a_language_model_runs_on_a_tiny_checkpoint(qwen3_folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), flags=re.DOTALL)
    code = blocks[1]
    for original, tiny in {'"Qwen/Qwen3-0.6B", dtype="bf16"': repr(str(qwen3_folder)), '"cuda"': '"cpu"'}.items():
        assert original in code
        code = code.replace(original, tiny)
    names: dict[str, Any] = {}  # Any: what the example defines
    exec(code, names)  # the example is the test
    assert names["gap"] < 1e-5


def test_the_readme_example_of_a_unified_model_runs_on_a_tiny_checkpoint(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), flags=re.DOTALL)
    code = blocks[2]
    for original, tiny in {
        '"ByteDance-Seed/BAGEL-7B-MoT", dtype="bf16"': repr(str(save_bagel(tmp_path / "bagel"))),
        '"cuda"': '"cpu"',
        "height=512, width=512": "height=32, width=32",
    }.items():
        assert original in code
        code = code.replace(original, tiny)
    names: dict[str, Any] = {}  # Any: what the example defines
    exec(code, names)  # the example is the test
    assert names["pictures"].shape == (2, 3, 32, 32)


def test_only_the_model_folders_import_a_framework() -> None:
    source = PACKAGE / "src" / "unirl" / "models"
    for file in source.glob("*.py"):
        tree = ast.parse(file.read_text())
        roots = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        roots += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in roots if name.split(".")[0] in {"diffusers", "transformers"}], file


def test_sd3_without_diffusers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("unirl.models.sd3.bundle")
    monkeypatch.delitem(sys.modules, "unirl.models.sd3.bundle")
    monkeypatch.setitem(sys.modules, "diffusers.models.transformers.transformer_sd3", None)
    with pytest.raises(ImportError, match=r"pip install 'unirl-models\[diffusers\]'"):
        importlib.import_module("unirl.models.sd3.bundle")


def test_language_models_without_transformers_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("unirl.models.causal_lm.attention")
    monkeypatch.delitem(sys.modules, "unirl.models.causal_lm.attention")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'unirl-models\[transformers\]'"):
        importlib.import_module("unirl.models.causal_lm.attention")


def test_the_stages_import_without_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("unirl.models")]:
        monkeypatch.delitem(sys.modules, name)
    for framework in ("transformers", "diffusers"):
        monkeypatch.setitem(sys.modules, framework, None)
    for name in ("unirl.models.text_pipeline", "unirl.models.pipeline"):
        importlib.import_module(name)


def test_a_bundle_that_writes_no_adapter_says_so(tmp_path):
    class Own(Bundle):
        pass

    with pytest.raises(ContractError, match="Own does not say how an adapter is written. Define write_lora there"):
        Own().export_lora(str(tmp_path), {}, rank=4, alpha=8.0, target_modules=["to_q"])
