"""Begins the first task of a set and prints, as one line of JSON, what it tells the model:
`python -m unirl.rollout.environments.verifiers.first OPTIONS`, the options as JSON."""

from __future__ import annotations

import json
import os
import sys

from unirl.rollout.environments.verifiers.exchange import Asked
from unirl.rollout.environments.verifiers.playing import player

_TIMEOUT_S = 100.0


def main(options: str) -> None:
    play = player(options).begin(0)
    asked = play.next(_TIMEOUT_S)
    if not isinstance(asked, Asked):
        raise RuntimeError("the harness ended without asking the model")  # noqa: TRY004 - not a type
    sys.stdout.write(json.dumps({"tools": asked.tools, "system_prompt": asked.system_prompt}) + "\n")
    sys.stdout.flush()
    play.close()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # threads of the library wait for the model
