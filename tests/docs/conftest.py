"""The scripts of docs/reference as modules."""

import importlib.util
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.fixture(scope="session")
def reference_script():
    """Imports a script of docs/reference by its name."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"{name}_page", REFERENCE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
