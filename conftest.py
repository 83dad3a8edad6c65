"""How the whole suite is run."""

import argparse
import importlib
import os
import re
import shutil
import sys
import zlib
from collections.abc import Generator
from types import ModuleType
from typing import Any

import hypothesis
import pytest

# The tests start some hundred processes that import torch: compiled modules on the disk halve the start of each.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before anything imports the hub's client, which reads it once: no test fetches anything.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before anything imports Ray: under `uv run` it would otherwise build an environment for its workers, and its own
# timeouts declare processes dead that start slowly because others run. Its workers would yield to all other processes.
for _name, _value in {
    "ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "USAGE_STATS_ENABLED": "0",
    "memory_monitor_refresh_ms": "0",
    "worker_register_timeout_seconds": "600",
    "agent_register_timeout_ms": "600000",
    "gcs_server_port_wait_time_s": "300",
    "gcs_server_request_timeout_seconds": "300",
    "health_check_timeout_ms": "120000",
    "worker_niceness": "0",
}.items():
    os.environ.setdefault(f"RAY_{_name}", _value)

# A busy machine is not a failure, and every run draws the same examples, so that a failure comes back. New ones:
# `uv run pytest --hypothesis-profile explore`.
hypothesis.settings.register_profile("unirl", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, derandomize=False, max_examples=1000)
hypothesis.settings.load_profile("unirl")


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws depends on its name alone, never on the tests that the same process ran before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(scope="session")
def uv() -> str:
    """The uv that runs this, which need not be on PATH; skips without one."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed")
    return found


@pytest.fixture(scope="session")
def ray_of_two_cores(tmp_path_factory: pytest.TempPathFactory) -> Generator[ModuleType]:
    """A local Ray with two cores, shared by the session: starting one takes longer than the tests.

    Its workers are forked from one process.
    """
    ray = pytest.importorskip("ray")
    forked: Any = importlib.import_module("forked_workers")  # next to the tests of unirl-train, whose runtime it serves
    with forked.ForkedWorkers(str(tmp_path_factory.mktemp("ray"))) as workers:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200_000_000,
            runtime_env={"py_executable": workers.command},
        )
        yield ray
        ray.shutdown()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="K/N",
        type=part,
        help="the K-th of N parts of the tests, K from 0; parts of whole files with --dist loadfile, else of tests",
    )


def part(text: str) -> tuple[int, int]:
    """K and N of `--part K/N`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K below N, as 0/3")
    return int(match[1]), int(match[2])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # Any: xdist's, which need not be installed
    """Tell a process of xdist how tests are shared; there the option is always "no"."""
    node.workerinput["dist"] = node.config.option.dist


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the part of `--part`, and begin the file of minutes first that would come late, and run alone."""
    if config.option.part is not None:
        k, n = config.option.part
        told = getattr(config, "workerinput", {"dist": config.getoption("dist", "no")})
        whole_files = told["dist"] == "loadfile"
        names = {item: item.nodeid.partition("::")[0] if whole_files else item.nodeid for item in items}
        others = [item for item in items if zlib.crc32(names[item].encode()) % n != k]
        items[:] = [item for item in items if zlib.crc32(names[item].encode()) % n == k]
        config.hook.pytest_deselected(items=others)
    items.sort(key=lambda item: item.path.name != "test_rehearse.py")


@pytest.hookimpl(tryfirst=True)  # before xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the whole suite over two processes, a file at a time; what is named on the command line runs in one.

    Most matrix tests are in a few files, which are shared by both. Three processes on two cores save no time: each
    collects all tests anew.
    """
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if is_whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses = min(2, os.cpu_count() or 1)
        is_matrix = config.option.markexpr.lstrip("(").startswith("matrix")
        config.option.dist = "worksteal" if is_matrix else "loadfile"
        config.option.loadscopereorder = False  # which would leave the few long tests of tests/e2e to the end
