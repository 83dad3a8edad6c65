"""The workspace obeys its own rules, and each rule is able to fail."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("architecture_rules", Path(__file__).with_name("rules.py"))
assert _SPEC is not None and _SPEC.loader is not None
rules = importlib.util.module_from_spec(_SPEC)
sys.modules["architecture_rules"] = rules  # dataclasses look their module up
_SPEC.loader.exec_module(rules)

EXTRAS = frozenset({"sglang", "vllm", "paddleocr"})


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    """Trees of some hundred files are not kept for the tests that follow."""
    yield
    rules.parsed.cache_clear()


def none_of(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


# The workspace


def test_the_rules_see_every_member_and_portion():
    names = {path.name for path in rules.members(ROOT)}
    assert {f"unirl-{part}" for part in ("types", "sde", "models", "train", "rollout", "reward")} <= names
    portions = {module.portion for module in rules.modules(ROOT)}
    assert {"types", "sde", "models", "rollout", "reward", "train", "distributed", "app"} <= portions


def test_unirl_is_a_namespace_without_an_init_file():
    none_of(rules.stray_namespace_files(ROOT))


def test_imports_follow_the_arrows():
    none_of(rules.wrong_arrows(ROOT))


def test_no_module_imports_what_is_above_it():
    none_of(rules.hidden_imports(ROOT))


def test_classes_and_functions_are_short():
    none_of(rules.oversized(ROOT))


def test_imported_packages_are_required():
    none_of(rules.undeclared_imports(ROOT))


def test_ray_and_hydra_stay_in_their_homes():
    none_of(rules.stray_frameworks(ROOT))


def test_only_apps_read_the_environment():
    none_of(rules.environment_reads(ROOT))


def test_nothing_unpickles_what_a_file_or_a_wire_brings():
    none_of(rules.unpickling(ROOT))


def test_one_module_knows_the_kinds_of_devices():
    none_of(rules.named_devices(ROOT))


def test_bounds_contain_the_versions_of_the_workspace():
    none_of(rules.wrong_bounds(ROOT))


def test_engines_and_paddleocr_are_declared_conflicting():
    none_of(rules.missing_conflicts(ROOT, EXTRAS))


def test_no_message_puts_a_second_full_stop_behind_an_error():
    none_of(rules.stops_after_errors(ROOT))


def test_every_package_has_its_files():
    none_of(rules.missing_package_files(ROOT))


def test_no_file_names_a_folder_of_one_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    none_of(rules.machine_paths(ROOT, [name for name in listed.stdout.split("\0") if name and name != "uv.lock"]))


def test_types_and_sde_import_nothing_but_torch():
    # unirl.sde.diffusers_scheduler is what the package's diffusers extra is for; importing unirl.sde leaves it alone.
    code = """
import importlib, pkgutil, sys
import torch
allowed = set(sys.stdlib_module_names)
before = set(sys.modules)
failed = []
for own, optional in (("unirl.types", ()), ("unirl.sde", ("diffusers_scheduler",))):
    package = importlib.import_module(own)
    for module in pkgutil.walk_packages(package.__path__, f"{own}."):
        if module.name.removeprefix(f"{own}.") not in optional:
            importlib.import_module(module.name)
    for name in sorted(set(sys.modules) - before):
        top = name.partition(".")[0]
        is_own = name == "unirl" or name == own or name.startswith(own + ".")
        if not is_own and top not in allowed and top not in ("torch", "numpy", "xxhash", "torchgen", "sympy", "mpmath"):
            failed.append(f"{own} imports {name}")
    before = set(sys.modules)
sys.exit("; ".join(failed) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


# The rules themselves, on planted violations


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def project(name: str, *, version: str = "0.1.0", dependencies: str = "", extras: str = "") -> str:
    return (
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = [{dependencies}]\n'
        f"[project.optional-dependencies]\n{extras}\n"
    )


def package(part: str, path: str, source: str) -> dict[str, str]:
    """A workspace member with one source file below src/unirl."""
    return {
        f"packages/unirl-{part}/pyproject.toml": project(f"unirl-{part}"),
        f"packages/unirl-{part}/src/unirl/{path}": source,
    }


@pytest.mark.parametrize(
    ("part", "path", "source", "message"),
    [
        ("types", "types/a.py", "import unirl.sde.kernels", "types imports unirl.sde.kernels of sde"),
        ("sde", "sde/a.py", "from unirl import types", "sde imports unirl.types of types"),
        ("reward", "reward/a.py", "from unirl.sde import loop", "reward imports unirl.sde"),
        ("models", "models/a.py", "def f():\n    from unirl.train.stack import X", "models imports unirl.train"),
        ("rollout", "rollout/a.py", "from unirl.models.sd3 import pipeline", "rollout imports unirl.models"),
        ("train", "trainer/a.py", "if True:\n    import unirl.rollout.checks", "train imports unirl.rollout"),
        (
            "train",
            "data/a.py",
            "import importlib\nimportlib.import_module('unirl.reward')",
            "train imports unirl.reward",
        ),
        ("models", "models/sd3/a.py", "from ...train import stack", "models imports unirl.train"),
        ("train", "algorithms/a.py", "import unirl.train.optim", "algorithms imports unirl.train.optim of train"),
        ("train", "train/a.py", "import unirl.app", "train imports unirl.app of apps"),
        ("train", "train/a.py", "import unirl.nowhere", "which no package ships"),
        ("train", "stray/a.py", "x = 1", "belongs to no known portion"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, part, path, source, message):
    found = rules.wrong_arrows(plant(tmp_path, package(part, path, source)))
    assert found
    assert all(message in line for line in found)


@pytest.mark.parametrize(
    ("part", "path", "source"),
    [
        (
            "train",
            "trainer/a.py",
            "from unirl.distributed import runtime\nfrom unirl.types import batch\nimport unirl.sde",
        ),
        ("models", "models/sd3/a.py", "from ..pipeline import X\nfrom . import bundle\nimport torch"),
        ("reward", "reward/a.py", "from unirl.types.reward import RewardRequest"),
        ("trainer", "app/a.py", "import unirl.models, unirl.rollout, unirl.reward, unirl.train, unirl.recipes"),
    ],
)
def test_right_arrows_pass(tmp_path, part, path, source):
    assert rules.wrong_arrows(plant(tmp_path, package(part, path, source))) == []


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("distributed/group/ray_worker.py", "from unirl.distributed.weight_sync.transports.base import Parcel", 2),
        ("distributed/group/ray_worker.py", "from unirl.distributed.tensor.planes import queue", 2),
        ("distributed/group/ray_worker.py", "from unirl.distributed.tensor import planes", 1),
        ("distributed/group/ray_worker.py", "from unirl.distributed.tensor.transport import outgoing", 0),
        ("distributed/held.py", "def f():\n    import unirl.distributed.runtime", 1),
        ("distributed/runtime.py", "from unirl.distributed.held import Held", 0),
    ],
)
def test_an_import_of_what_is_above_is_found(tmp_path, path, source, count):
    assert len(rules.hidden_imports(plant(tmp_path, package("train", path, source)))) == count


@pytest.mark.parametrize(
    ("head", "lines", "count"), [("class Long:", 300, 1), ("class Long:", 299, 0), ("def long():", 100, 1)]
)
def test_a_long_class_or_function_is_found(tmp_path, head, lines, count):
    root = plant(tmp_path, package("types", "types/own.py", head + "\n" + "    x = 1\n" * lines))
    assert len(rules.oversized(root)) == count


def test_a_stray_init_file_is_found(tmp_path):
    assert rules.stray_namespace_files(plant(tmp_path, package("sde", "sde/__init__.py", ""))) == []
    assert len(rules.stray_namespace_files(plant(tmp_path, package("sde", "__init__.py", "")))) == 1


@pytest.mark.parametrize(
    ("part", "path", "source", "count"),
    [
        ("train", "train/a.py", "def f():\n    import ray", 1),
        ("train", "distributed_else/a.py", "import ray.util", 1),
        ("train", "distributed/group/a.py", "import ray", 0),
        ("models", "models/a.py", "from hydra.utils import instantiate", 2),
        ("train", "config/a.py", "from omegaconf import OmegaConf\nimport hydra", 0),
        ("trainer", "app/a.py", "import hydra\nimport omegaconf", 0),
        ("trainer", "app/a.py", "import ray", 1),
    ],
)
def test_a_framework_outside_its_home_is_found(tmp_path, part, path, source, count):
    assert len(rules.stray_frameworks(plant(tmp_path, package(part, path, source)))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import os\nx = os.environ['A']", 1),
        ("import os as system\ndef f():\n    return system.getenv('A')", 1),
        ("from os import environ", 1),
        ("from os import getenv as read", 1),
        ("import os\nx = os.path.join('a', 'b')\nenviron = 3", 0),
    ],
)
def test_a_read_of_the_environment_is_found(tmp_path, source, count):
    assert len(rules.environment_reads(plant(tmp_path, package("train", "train/a.py", source)))) == count
    assert rules.environment_reads(plant(tmp_path / "app", package("trainer", "app/a.py", source))) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import pickle", 1),
        ("def f():\n    from pickle import loads", 2),
        ("import cloudpickle as harmless", 1),
        ("import joblib.numpy_pickle", 1),
        ("import torch\ntorch.load('a')", 1),
        ("import torch\ntorch.load('a', weights_only=False)", 1),
        ("import torch\ntorch.load('a', weights_only=True)", 0),
        ("import numpy\nnumpy.load('a', allow_pickle=True)", 1),
        ("import numpy\nnumpy.load('a')", 0),
        ("import pandas\npandas.read_pickle('a')", 1),
        ("from torch.distributed.checkpoint import FileSystemReader", 1),
        ("import torch.distributed as dist\ndist.all_gather_object([], 1)", 1),
        ("def f(pipe):\n    return pipe.recv()", 1),
        ("def f(pipe, socket):\n    return pipe.recv_bytes() + socket.recv(3)", 0),
    ],
)
def test_what_unpickles_is_found(tmp_path, source, count):
    assert len(rules.unpickling(plant(tmp_path, package("train", "train/a.py", source)))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch\ntorch.cuda.synchronize()", 1),
        ("def f(x):\n    return x.is_cuda or x.cuda()", 2),
        ("d = 'cuda'", 1),
        ("d = f'cuda:{0}'", 1),
        ("d = 'set device: npu'\nv = 'CUDA_VISIBLE_DEVICES'", 2),
        ('"""On "cuda" only."""\no = "disable-cuda-graph"\nimport torch\ntorch.accelerator.synchronize()', 0),
    ],
)
def test_a_name_of_a_kind_of_device_is_found(tmp_path, source, count):
    assert len(rules.named_devices(plant(tmp_path, package("train", "train/a.py", source)))) == count
    (tmp_path / "app" / "apps" / "trainer" / "bench").mkdir(parents=True)
    script = tmp_path / "app" / "apps" / "trainer" / "bench" / "a.py"
    script.write_text(source)
    assert len(rules.named_devices(tmp_path / "app")) == count
    home = plant(tmp_path / "home", package("types", "types/device_kinds.py", source))
    assert rules.named_devices(home) == []


def test_what_unpickles_has_a_home(tmp_path):
    source = "import pickle\nfrom torch.distributed.checkpoint import FileSystemReader\npickle.Unpickler"
    assert rules.unpickling(plant(tmp_path, package("train", "train/backend/state_reader.py", source))) == []


@pytest.mark.parametrize(
    ("end", "count"), [("{error}. Mend it.", 1), ("{error}: mend it.", 0), ("{as_sentence(error)} Go.", 0)]
)
def test_a_full_stop_behind_an_error_is_found(tmp_path, end, count):
    source = f"try:\n    a()\nexcept OSError as error:\n    raise ValueError(f'no file: {end}') from error\n"
    assert len(rules.stops_after_errors(plant(tmp_path, package("train", "train/a.py", source)))) == count


def test_missing_package_files_are_found(tmp_path):
    text = "long enough to say something to a stranger"
    complete = {
        **package("sde", "sde/__init__.py", ""),
        "packages/unirl-sde/src/unirl/sde/py.typed": "",
        "packages/unirl-sde/README.md": text,
        "packages/unirl-sde/CHANGELOG.md": text,
        "packages/unirl-sde/tests/test_a.py": "",
    }
    assert rules.missing_package_files(plant(tmp_path / "complete", complete)) == []
    for number, name in enumerate(list(complete)[2:]):
        partial = {key: value for key, value in complete.items() if key != name}
        assert len(rules.missing_package_files(plant(tmp_path / str(number), partial))) == 1, name
    empty = {**complete, "packages/unirl-sde/README.md": "# unirl-sde\n"}
    assert len(rules.missing_package_files(plant(tmp_path / "empty", empty))) == 1


@pytest.mark.parametrize(
    ("requirement", "count"),
    [
        ("unirl-types>=0.1,<0.2", 0),
        ("unirl-types[extra]>=0.1, <0.2", 0),
        ("unirl-types>=0.2,<0.3", 1),
        ("unirl-types>=0.1,<0.1.5", 1),
        ("unirl-types>=0.1", 1),
        ("unirl-types", 1),
        ("torch>=9", 0),
    ],
)
def test_bounds_that_exclude_a_member_are_found(tmp_path, requirement, count):
    plant(
        tmp_path,
        {
            "packages/unirl-types/pyproject.toml": project("unirl-types", version="0.1.7"),
            "apps/trainer/pyproject.toml": project(
                "unirl-trainer", dependencies=f'"{requirement}"', extras='x = ["unirl-types[x]"]'
            ),
        },
    )
    assert len(rules.wrong_bounds(tmp_path)) == count


def test_an_import_that_is_not_required_is_found(tmp_path):
    plant(tmp_path, package("models", "models/a.py", "import unirl.types\nimport unirl.models.b"))
    assert rules.undeclared_imports(tmp_path) == [
        "packages/unirl-models/src/unirl/models/a.py:1: imports unirl.types; require unirl-types"
    ]
    required = project("unirl-models", dependencies='"unirl-types>=0.1,<0.2"')
    assert rules.undeclared_imports(plant(tmp_path, {"packages/unirl-models/pyproject.toml": required})) == []


def test_a_missing_conflict_is_found(tmp_path):
    two = '[tool.uv]\nconflicts = [[{ extra = "sglang" }, { extra = "vllm" }]]\n'
    assert rules.missing_conflicts(plant(tmp_path, {"pyproject.toml": two}), EXTRAS) == [
        "extras paddleocr and sglang are not declared conflicting",
        "extras paddleocr and vllm are not declared conflicting",
    ]
    assert len(rules.missing_conflicts(plant(tmp_path, {"pyproject.toml": "[project]\n"}), EXTRAS)) == 3


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("data: " + "/work" + "/main/data.json", 1),
        ("see " + "/root" + "/.cache", 1),
        ("'" + "/home" + "/someone'", 1),
        ("(file://" + "/home" + "/someone)", 1),
        ("https://example.org" + "/home" + "/page", 0),
        ("$HOME/work/dir and ./home/x and src/root/a", 0),
        ("/workshop/x /homes/y", 0),
    ],
)
def test_a_path_of_one_machine_is_found(tmp_path, line, count):
    plant(tmp_path, {"notes.md": f"first\n{line}\n"})
    assert len(rules.machine_paths(tmp_path, ["notes.md"])) == count


def test_binary_and_absent_files_hold_no_paths(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\0 " + b"/root" + b"/x")
    assert rules.machine_paths(tmp_path, ["image.png", "gone.md"]) == []
