"""How the whole suite is run."""

import os

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the whole suite over two processes, a file at a time; what is named on the command line runs in one."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if is_whole and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses = min(2, os.cpu_count() or 1)
        config.option.dist = "loadfile"
