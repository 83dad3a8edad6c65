"""What the process and this machine are, asked once at the entry: environment variables, devices, packaged files."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import logging
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from omegaconf import OmegaConf

from unirl.config.placement import devices_between
from unirl.datasets.catalog import command_for
from unirl.types.device_kinds import CPU, KINDS, USUAL, kind_of
from unirl.types.recipe import Machine

WORLDS = ("shapes", "arithmetic", "moves", "sounds", "tools", "zoom", "tabletop", "cartpole")
"""Packages with a small model and their own data."""
_UNCOUNTED = ("kfd", "dri")
"""Entries of /dev where a GPU may be that only its driver counts: of AMD, and of Intel and others."""


def prepare_process() -> None:
    """Defaults that must stand before torch and ray are imported. What the user has set wins."""
    # Under `uv run`, Ray would otherwise build an environment for its workers.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A user's own scorer or reward function next to the recipe, as `python -m` finds it; installed packages come first.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries, in a log file


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt(3)."""


def settle_on_cpu(device: str) -> None:
    """For a run on the CPU: one thread, because small models are slower on several and results depend on the number;
    and freed memory stays with the process."""
    if not kind_of(device).is_accelerator:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
        if (torch := sys.modules.get("torch")) is not None:  # `device_here` may have asked it
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Tell glibc not to hand large freed blocks back to the kernel; another C library is left alone.

    Otherwise every temporary of an activation's size is mapped and faulted in anew. CPU seconds of three rollouts,
    medians of five runs with and without it in turns: worlds/shapes/nft samples in 3.27 instead of 3.52 and trains
    in 3.87 instead of 3.92; worlds/arithmetic/grpo takes as long (.76 and .74). Peak memory is the same.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_TOP_PAD, 64 << 20)


def this_machine() -> Machine:
    """Cores and accelerators here; without limit if the run joins a cluster, whose devices Ray knows (RAY_ADDRESS)."""
    if cluster_address():
        return Machine(sys.maxsize, sys.maxsize, command_for)
    counted = _counted(os.environ, _DEV)
    num_gpus = _asked()[1] if counted is None else counted
    return Machine(len(os.sched_getaffinity(0)), num_gpus, command_for)


def device_here() -> str:
    """What `device: auto` stands for: the accelerator that torch finds, else the CPU; of a cluster elsewhere
    (RAY_ADDRESS) the usual one, if this machine has none. Imports torch where there may be an accelerator."""
    name = CPU if _counted(os.environ, _DEV) == 0 else _asked()[0]
    return USUAL if name == CPU and cluster_address() else name


def named_interpreters() -> list[str]:
    """Interpreters of engines that the user names in the environment."""
    return [value for name in ("VLLM_PYTHON", "SGLANG_PYTHON", "VLLM_OMNI_PYTHON") if (value := os.environ.get(name))]


def cluster_address() -> str | None:
    """host:port of the Ray cluster that RAY_ADDRESS names, or None."""
    return os.environ.get("RAY_ADDRESS") or None


_DEV = Path("/dev")


def _counted(environment: Mapping[str, str], devices: Path) -> int | None:
    """Number of accelerators by their files, less those that the environment hides; None where only torch knows."""
    names = [entry.name for entry in devices.iterdir()] if sys.platform == "linux" else []
    for kind in KINDS.values():
        present = 0 if kind.files is None else sum(1 for name in names if re.fullmatch(kind.files, name))
        if present:
            visible = environment.get(kind.visible or "")
            named = [] if visible is None else [part for part in visible.split(",") if part.strip() not in ("", "-1")]
            return present if visible is None else min(present, len(named))
    return None if sys.platform != "linux" or set(_UNCOUNTED) & set(names) else 0


def _asked() -> tuple[str, int]:
    """Device that torch finds, and their number; the CPU, and 0, where it finds none."""
    kind = torch_devices().accelerator()
    return (CPU, 0) if kind is None else (kind.name, torch_devices().num_devices(kind.name))


def torch_devices() -> ModuleType:
    """`unirl.types.devices`, which loads torch: commands that compute nothing start without it."""
    from unirl.types import devices

    return devices


def register_resolvers() -> None:
    """`${shapes:PATH}`, and so for every world, in recipes: a file of a world that comes with the trainer.
    `${devices:8,0,3/4}`: see `devices_between`."""
    OmegaConf.register_new_resolver("devices", devices_between, replace=True)
    for world in WORLDS:
        OmegaConf.register_new_resolver(world, functools.partial(packaged_path, world), replace=True)


def packaged_path(world: str, name: str) -> str:
    """Absolute path of a file or folder of a world that comes with the trainer."""
    return str(importlib.resources.files(f"unirl.worlds.{world}") / name)


class StandardErrorHandler(logging.StreamHandler):
    """Writes to whatever standard error is at that moment, so that a live display can keep its place below."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


@contextmanager
def logging_to(path: Path) -> Generator[None]:
    """Events go to a file too, appended, with their date. What ends the block is its last line."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, (), None))
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def start_logging(is_debug: bool) -> None:
    """Events of our own packages, one line each; of other packages warnings only."""
    handler = StandardErrorHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("unirl").setLevel(logging.DEBUG if is_debug else logging.INFO)
