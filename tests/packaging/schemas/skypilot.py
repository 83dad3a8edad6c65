"""Writes the schema that SkyPilot checks a task by into skypilot.json, next to this file.

uvx --with pyyaml --from skypilot==0.14.1 python tests/packaging/schemas/skypilot.py
"""

import importlib
import importlib.metadata
import json
from pathlib import Path

schemas = importlib.import_module("sky.utils.schemas")
task = schemas.get_task_schema()
task["properties"]["resources"] = schemas.get_resources_schema()
task["properties"].pop("config")  # settings of SkyPilot itself, which no task here has
task["$comment"] = f"SkyPilot {importlib.metadata.version('skypilot')}, Apache-2.0; written by skypilot.py"
# Its own validator knows "case_insensitive_enum"; others pass over a keyword that they do not know.
(Path(__file__).with_name("skypilot.json")).write_text(json.dumps(task, indent=1) + "\n", encoding="utf-8")
