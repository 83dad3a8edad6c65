"""Samples that vLLM holds, with their keys and values, between a call that was ended early and the one that goes on.

While they are held they are ordinary requests of vLLM: whenever it computes for other calls, they get tokens too, with
the weights of that moment, which the call that goes on with them then finds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.rollout.engine.served_text.call import Generate

_MAX_PUSHES = 2
"""Pushes through which a sample is held: one that no call went on with after the first has gone on elsewhere."""


@dataclass
class Sample:
    """A sample as far as vLLM has generated it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The policy of each token."""
    reason: str | None = None
    refusal: str = ""
    num_preempted: int = 0
    """Times that vLLM dropped its keys and values for want of memory, and computed them again."""


@dataclass
class Row:
    """A sample of a running call."""

    request: str
    """Its name in vLLM."""
    sample: Sample
    num_told: int = 0
    """Tokens that earlier calls have told the trainer."""
    num_preempted: int = 0
    """Those of the sample when they were told."""
    num_pushes: int = 0
    """Pushes since a call went on with it."""

    @property
    def is_begun(self) -> bool:
        """True if an earlier call made a part of it."""
        return self.num_told > 0

    @property
    def is_in_place(self) -> bool:
        """True if the call goes on with kept keys and values."""
        return self.is_begun and self.sample.num_preempted == self.num_preempted


class KeptSamples:
    """Finds held samples for the calls that go on with them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[object, ...], Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, call: Generate, row: int, own: Row) -> str | None:
        """Hold row `row` of a call, all of whose tokens the trainer knows now. Returns the name of a request that it
        replaces; None: none."""
        former = self._rows.pop(_key(call, row), None)
        self._rows[_key(call, row)] = Row(own.request, own.sample, len(own.sample.tokens), own.sample.num_preempted)
        return None if former is None else former.request

    def take(self, call: Generate, row: int) -> Row | None:
        """The sample that row `row` of a call goes on with, which is then held no longer; None: there is none with
        these tokens."""
        if not call.names:
            return None
        own = self._rows.get(_key(call, row))
        if own is None or own.sample.prompt + own.sample.tokens[: own.num_told] != call.prompts[row]:
            return None
        return self._rows.pop(_key(call, row))

    def pushed(self) -> list[str]:
        """Requests that are held no longer, since no call went on with them after an earlier push. Called after each
        push."""
        for own in self._rows.values():
            own.num_pushes += 1
        left = {key: own for key, own in self._rows.items() if own.num_pushes <= _MAX_PUSHES}
        gone, self._rows = [own.request for key, own in self._rows.items() if key not in left], left
        return gone

    def clear(self) -> list[str]:
        """Requests that were held, of which none is held any longer."""
        gone, self._rows = [own.request for own in self._rows.values()], {}
        return gone


def _key(call: Generate, row: int) -> tuple[object, ...]:
    """What is the same of all calls of a sample."""
    sampling = (call.temperature, call.top_p, call.top_k, call.max_new_tokens, *call.stop_token_ids)
    return call.names[row], *sampling
