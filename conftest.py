"""How the whole suite is run."""

import os
import shutil

import hypothesis
import pytest

hypothesis.settings.register_profile("unirl", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("unirl")


@pytest.fixture(scope="session")
def uv() -> str:
    """The uv that runs this, which need not be on PATH; skips without one."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed")
    return found


@pytest.hookimpl(tryfirst=True)  # before xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the whole suite over two processes, a file at a time; what is named on the command line runs in one."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if is_whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses = min(2, os.cpu_count() or 1)
        config.option.dist = "loadfile"
