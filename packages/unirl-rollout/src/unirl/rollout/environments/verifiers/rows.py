"""Writes the tasks of a set as rows of a data file: `python -m unirl.rollout.environments.verifiers.rows TASKSET
[--options JSON] [--limit N] > tasks.jsonl`, in the Python environment that has the task set."""

from __future__ import annotations

import argparse
import json
import sys

from unirl.rollout.environments.verifiers.playing import Options, Player


def main() -> None:
    parser = argparse.ArgumentParser(prog="rows", description="The tasks of a set of verifiers as rows of a data file.")
    parser.add_argument("taskset", help="id of an installed task set, or a module that exports one")
    parser.add_argument("--options", default="{}", help="config of the task set, as JSON")
    parser.add_argument("--limit", type=int, help="most rows; an endless task set needs it")
    asked = parser.parse_args()
    for task in Player(Options(asked.taskset, json.loads(asked.options))).tasks(asked.limit):
        row = {"prompt": task.data.prompt_text, "task": task.data.idx}
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
