"""Which backend the contract tests run on, for example UNIRL_TESTED_BACKEND=unirl.train.backend.veomni.VeOmniBackend.

The name is in the environment, so that processes of ranks know it too.
"""

from __future__ import annotations

import importlib
import os

from unirl.train.backend.fsdp import FSDPBackend

VARIABLE = "UNIRL_TESTED_BACKEND"


def backend_class() -> type[FSDPBackend]:
    """FSDPBackend, or the subclass that the environment names."""
    module, _, name = os.environ.get(VARIABLE, "unirl.train.backend.fsdp.FSDPBackend").rpartition(".")
    return vars(importlib.import_module(module))[name]
