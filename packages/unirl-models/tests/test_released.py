"""Sizes of released checkpoints stand next to their families and are found there."""

import importlib
import subprocess
import sys
from pathlib import Path

from unirl.models import released
from unirl.models.released import all_released


def test_the_table_of_every_family_is_found_and_no_checkpoint_is_in_two():
    found = all_released()
    folders = [path.parent.name for path in Path(released.__file__).parent.glob("*/released.py")]
    assert len(folders) > 1
    tables = [importlib.import_module(f"unirl.models.{folder}.released").RELEASED for folder in folders]
    assert sum(map(len, tables)) == len(found)


def test_sizes_are_read_without_torch():
    code = "import sys, unirl.models.released as r; assert r.all_released() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
