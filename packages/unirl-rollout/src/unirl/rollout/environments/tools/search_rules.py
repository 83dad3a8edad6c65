"""What a search needs: a corpus whose rows are right. See `unirl.types.recipe`."""

from __future__ import annotations

from pathlib import Path

from unirl.rollout.environments.tools.corpus import read_corpus
from unirl.types.errors import DataError
from unirl.types.recipe import Fault, Machine, Messages, Part, Run


def corpus_is_right(own: Part, run: Run, machine: Machine) -> Messages:
    """The corpus is there and can be read. What is there and wrong is a Fault."""
    path = Path(str(own.node.get("corpus"))).expanduser()
    try:
        read_corpus(path)
    except DataError as error:
        message = f"{own.at}.corpus: {error}"
        yield Fault(message) if path.exists() else message


MACHINE_RULES = (corpus_is_right,)
RULES = ()
