"""Trains a recipe on a Ray cluster of this machine with the nodes that it names: `on_nodes.py RECIPE.json RUN_DIR`."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path

import stopping

loader = importlib.machinery.SourceFileLoader(
    "same_on_two_nodes", str(Path(__file__).resolve().parents[2] / "scripts" / "same_on_two_nodes")
)
script = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(loader.name, loader, origin=loader.path))
script.__file__ = loader.path
loader.exec_module(script)  # sets Ray's environment too, so before ray is imported

recipe, run_dir = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
num_nodes = recipe["cluster"]["num_nodes"]
with script.cluster(num_nodes, cores_per_node=recipe["num_devices"] // num_nodes) as address:
    recipe["cluster"]["address"] = address
    _, records = stopping.run(recipe, run_dir)
(run_dir / "records.json").write_text(json.dumps({step: stopping.comparable(each) for step, each in records.items()}))
