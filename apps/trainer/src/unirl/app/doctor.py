"""`trainer doctor`: what this machine is, what is installed, and how to get what is missing. Changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unirl.app.environment import cluster_address, torch_devices
from unirl.config.catalog import available
from unirl.datasets.catalog import FOLDER, SETS
from unirl.rollout.environments.tools.python import PythonInterpreter
from unirl.types.errors import ConfigError

APP = "unirl-trainer"
SHOWN = ("torch", "diffusers", "transformers", "peft", "ray", "aiohttp")
"""Libraries whose versions explain most differences between machines."""
EXTRAS: Mapping[str, str] = {
    "vllm": "rollouts of texts by vLLM on GPUs",
    "sglang": "rollouts by SGLang on GPUs",
    "vllm-omni": "rollouts of images and videos by vLLM-Omni on GPUs",
    "veomni": "sharding by VeOmni",
    "transfer-queue": "samples between workers through TransferQueue",
    "ocr": "the scorer of drawn words",
    "paddleocr": "the same by PaddleOCR",
    "mujoco": "policies that act in environments of MuJoCo",
    "mcp": "tools of MCP servers",
    "math": "answers of mathematics as expressions",
    "wandb": "the tracker Weights & Biases",
    "swanlab": "the tracker SwanLab",
    "mlflow": "the tracker MLflow",
    "trackio": "the tracker trackio",
    "opentelemetry": "traces of what worked when",
}
"""Extra of the trainer -> what it is for."""
ENGINES_ON_CPU = ("vllm-cpu", "sglang-cpu", "vllm-omni-cpu")
"""Projects in environments/ of a clone, each an environment of an engine's separate process."""
GIB = 1 << 30


@dataclass(frozen=True)
class Line:
    """One finding: a name, whether it is there, what it is, and how to get it where it is not."""

    name: str
    is_there: bool
    text: str
    remedy: str = ""


def examine(console: Console | None = None) -> int:
    """Print all findings; returns 1 where a package of UniRL itself lacks something that it needs, else 0."""
    console = console or Console()
    packages = list(_packages())
    for title, lines in (
        ("machine", list(_machine())),
        ("packages", packages),
        ("extras", list(_extras())),
        ("engines on a CPU", list(_engines())),
        ("data", list(_data())),
        ("recipes", list(_recipes())),
    ):
        table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
        for line in lines:
            mark = Text("yes", "green") if line.is_there else Text("no", "yellow")
            table.add_row(mark, line.name, Text(line.text), Text(line.remedy, "bold"))
        console.print(table)
        console.print()
    return 0 if all(line.is_there for line in packages) else 1


def _machine() -> Iterator[Line]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    is_supported = platform.system() == "Linux" and platform.machine() == "x86_64"
    yield Line("system", is_supported, system, "" if is_supported else "the lock is of Linux on x86-64")
    yield Line("cores", True, str(len(os.sched_getaffinity(0))))
    memory = psutil.virtual_memory()
    yield Line("memory", True, f"{memory.total / GIB:.0f} GiB, {memory.available / GIB:.0f} free")
    free = shutil.disk_usage(".").free / GIB
    yield Line("disk", free > 1, f"{free:.0f} GiB free here", "" if free > 1 else "a run needs room for checkpoints")
    kind = torch_devices().accelerator()
    if kind is None:
        yield Line("accelerator", False, "none that torch finds", "recipes of small worlds train on the CPU")
    else:
        count = torch_devices().num_devices(kind.name)
        yield Line("accelerator", True, f"{count} x {kind.hardware}")
    try:
        PythonInterpreter()
    except ConfigError as error:
        yield Line("sandbox", False, "code of models is not isolated", str(error))
    else:
        yield Line("sandbox", True, "code of models is isolated (the tool PythonInterpreter)")
    if address := cluster_address():
        yield Line("cluster", True, f"RAY_ADDRESS is {address}: runs with runtime=ray join it")


def _packages() -> Iterator[Line]:
    names = [APP, *sorted({Requirement(text).name for text in requires(APP) or () if text.startswith("unirl-")})]
    for name in names:
        if missing := _missing(name, frozenset()):
            yield Line(name, False, version(name), f"uv sync, or install {', '.join(missing)}")
    yield Line("unirl", True, ", ".join(f"{name.removeprefix('unirl-')} {version(name)}" for name in names))
    yield Line("libraries", True, ", ".join(f"{name} {version(name)}" for name in SHOWN))


def _extras() -> Iterator[Line]:
    for name in metadata(APP).get_all("Provides-Extra") or ():
        missing = _missing(APP, frozenset({name}))
        yield Line(name, not missing, EXTRAS.get(name, ""), f"uv sync --extra {name}" if missing else "")


def _missing(name: str, extras: frozenset[str], seen: frozenset[tuple[str, frozenset[str]]] = frozenset()) -> list[str]:
    """Distributions that a package needs with these extras, and that are absent or of another version."""
    found = []
    for text in requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            continue
        try:
            present = version(requirement.name)
        except PackageNotFoundError:
            found.append(str(requirement).split(";")[0].strip())
            continue
        if not requirement.specifier.contains(present, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier} instead of {present}")
        inner = frozenset(requirement.extras)
        key = (requirement.name, inner)
        if requirement.name.startswith("unirl-") and key not in seen:
            found += _missing(requirement.name, inner, seen | {key})
    return sorted(set(found))


def _engines() -> Iterator[Line]:
    for name in ENGINES_ON_CPU:
        python = Path("environments") / name / ".venv" / "bin" / "python"
        is_there = python.exists()
        remedy = "" if is_there else f"uv sync --project environments/{name}, in a clone"
        yield Line(name.removesuffix("-cpu"), is_there, "a separate environment next to the trainer's", remedy)


def _data() -> Iterator[Line]:
    there = [
        name for name, made in SETS.items() if all((FOLDER / name / output.file).exists() for output in made.outputs)
    ]
    text = f"{len(there)} of {len(SETS)} in {FOLDER}/{': ' if there else ''}{', '.join(there)}"
    yield Line("prompts", bool(there), text, "uv run trainer data list, then uv run trainer data prepare NAME")


def _recipes() -> Iterator[Line]:
    names = list(available())
    worlds = [name for name in names if name.startswith("worlds/")]
    yield Line("small worlds", True, f"{len(worlds)} recipes train on a CPU: uv run trainer list")
    has_device = torch_devices().accelerator() is not None or bool(cluster_address())
    remedy = "" if has_device else "a machine with GPUs; uv run trainer rehearse RECIPE says how many and how large"
    yield Line("released models", has_device, f"{len(names) - len(worlds)} recipes", remedy)
