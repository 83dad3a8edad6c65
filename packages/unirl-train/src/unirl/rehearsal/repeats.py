"""What a run does many times alike runs once: forwards without gradient, and backward passes of an update.

The others repeat what the first one counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map_only

from unirl.algorithms.base import LossPart, MicroBatch, StageAlgorithm
from unirl.algorithms.reward_gradient import RewardGradient
from unirl.rehearsal.mode import Rehearsal
from unirl.rehearsal.operators import Call, TensorShape
from unirl.types.devices import PRETEND

NUM_RUN = 2
"""Loss parts of a micro-batch that run before others repeat the second, which has gradients in memory."""

Value = Any  # Any: arguments and results of a model


PartKind = Literal["first update", "later updates", "reward gradients", "anchors", "judged anchors", "optimizer"]
"""Losses with their backward passes, in the first update and in those after it, without the gradients of rewards with
respect to clean samples. Updates after the first have anchors, one that is judged as a whole has them for all its
samples."""


class TrainingPart(NamedTuple):
    """A part of training, whose share of a step may differ from its share of a rehearsal."""

    kind: PartKind
    track: str | None = None


@dataclass(frozen=True)
class Cost:
    """What something did."""

    peak: int
    """Most bytes above those before it."""
    operators: Counter[Call]
    collectives: dict[str, int]


class Repeats:
    """Within `active`, the forwards of some modules without gradient, and the middle backward passes of each
    micro-batch, are counted without being run again."""

    def __init__(self, mode: Rehearsal) -> None:
        self.mode = mode
        self._shapes: dict[Value, Value] = {}
        """Results by what they depend on."""
        self._costs: dict[Value, Cost] = {}
        self._skips_training = False
        self.noted: dict[TrainingPart, Counter[Call]] = {}
        """Calls of the parts of training."""
        self._inner = Counter[Call]()
        """Calls of the parts that ended within the one that runs."""

    @contextmanager
    def active(self, modules: Iterable[nn.Module], algorithms: Mapping[str, StageAlgorithm]) -> Generator[None]:
        """Take the place of `forward`, `losses` and `anchor`. algorithms: by track."""
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(replaced(module, "forward", self._forwards(module.forward, id(module))))
            for track, algorithm in algorithms.items():
                stack.enter_context(replaced(algorithm, "losses", self._losses(track, algorithm)))
                stack.enter_context(replaced(algorithm, "anchor", self._anchor(track, algorithm)))
                if isinstance(algorithm, RewardGradient):
                    gradient = self.as_part(TrainingPart("reward gradients", track), algorithm.loss_and_gradient)
                    stack.enter_context(replaced(algorithm, "loss_and_gradient", gradient))
            yield

    def _forwards(self, forward: Callable[..., Value], owner: int) -> Callable[..., Value]:
        def run(*args: Value, **kwargs: Value) -> Value:
            key = _key(owner, args, kwargs)
            trains = torch.is_grad_enabled()
            if key is None or (trains and not (self._skips_training and key in self._shapes)):
                out = forward(*args, **kwargs)
                if key is not None:
                    self._shapes[key] = tree_map_only(Tensor, shape_of, out)
                return out
            if not trains and key not in self._costs:
                self._costs[key], out = self.measured(lambda: forward(*args, **kwargs))
                self._shapes[key] = tree_map_only(Tensor, shape_of, out)
                return out
            if not trains:
                self.count(self._costs[key])
            return tree_map_only(Shape, lambda shape: shape.made(trains), self._shapes[key])

        return run

    def _losses(self, track: str, algorithm: StageAlgorithm) -> Callable[[MicroBatch], Iterator[LossPart]]:
        losses = algorithm.losses

        def run(micro: MicroBatch) -> Iterator[LossPart]:
            with self.noting(TrainingPart("later updates" if micro.update else "first update", track)):
                yield from parts_of(micro)

        def parts_of(micro: MicroBatch) -> Iterator[LossPart]:
            left, parts = algorithm.num_terms(micro.track), losses(micro)
            cost: Cost | None = None
            sizes: list[int] = []
            while True:
                # The last one makes the ranks exchange gradients.
                self._skips_training = len(sizes) >= NUM_RUN and cost is not None and left > sizes[-1]
                try:
                    if self._skips_training and cost is not None:
                        part = next(parts)
                        self.count(cost)
                        yield part
                    elif len(sizes) == NUM_RUN - 1:
                        with self.watched() as watch:
                            part = next(parts)
                            yield part
                        cost = watch[0]
                    else:
                        part = next(parts)
                        yield part
                except StopIteration:
                    return
                finally:
                    self._skips_training = False
                sizes.append(part.num_terms)
                left -= part.num_terms
                del part

        return run

    def _anchor(self, track: str, algorithm: StageAlgorithm) -> Callable[..., Value]:
        kind: PartKind = "judged anchors" if algorithm.judges_update else "anchors"
        return self.as_part(TrainingPart(kind, track), algorithm.anchor)

    def as_part(self, part: TrainingPart, call: Callable[..., Value]) -> Callable[..., Value]:
        """A function whose calls are those of a part."""

        def run(*args: Value, **kwargs: Value) -> Value:
            with self.noting(part):
                return call(*args, **kwargs)

        return run

    @contextmanager
    def noting(self, part: TrainingPart) -> Generator[None]:
        """The calls of what runs within it are kept as those of this part too, without those of parts within it."""
        outer, self._inner = self._inner, Counter[Call]()
        with self.watched() as found:
            yield
        whole = found[0].operators
        self.noted.setdefault(part, Counter()).update(whole - self._inner)
        self._inner = outer + whole

    @contextmanager
    def repeated(self, times: int) -> Generator[None]:
        """What runs within it is counted so many times."""
        with self.watched() as found:
            yield
        self._add(found[0], times - 1)

    def measured(self, call: Callable[[], Value]) -> tuple[Cost, Value]:
        """What a call does, and its result."""
        with self.watched() as found:
            out = call()
        return found[0], out

    @contextmanager
    def watched(self) -> Generator[list[Cost]]:
        """A list to which the cost of what runs within it is added at the end."""
        mode, found = self.mode, list[Cost]()
        before, moved = Counter(mode.operators_of_phase()), dict(mode.collectives_of_phase())
        with mode.ledger.watched() as watch:
            yield found
        now = mode.collectives_of_phase()
        passed = {name: now[name] - moved.get(name, 0) for name in now if now[name] != moved.get(name, 0)}
        found.append(Cost(watch.peak, mode.operators_of_phase() - before, passed))

    def count(self, cost: Cost) -> None:
        """Count something that is not run again."""
        self.mode.ledger.bump(cost.peak)
        self._add(cost)

    def _add(self, cost: Cost, times: int = 1) -> None:
        """Add calls and bytes sent."""
        mode = self.mode
        now = mode.operators_of_phase()
        for call, num in cost.operators.items():
            now[call] += times * num
        for name, size in cost.collectives.items():
            mode.collectives_of_phase()[name] += times * size


@dataclass(frozen=True)
class Shape(TensorShape):
    """A tensor without memory, and its place in the graph."""

    trains: bool

    def made(self, trains: bool) -> Tensor:
        """A new one; a leaf of the graph where the original depends on what trains."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=PRETEND)
        return made.requires_grad_(trains and self.trains)


def shape_of(tensor: Tensor) -> Shape:
    return Shape(tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.requires_grad)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Generator[None]:
    """Within it an object has another method."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def circumstances() -> Value:
    """What the cost of a forward depends on besides its arguments."""
    return torch.is_autocast_enabled(PRETEND), torch.get_autocast_dtype(PRETEND), torch.is_grad_enabled()


def _key(owner: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value | None:
    """What a forward's cost depends on; None for arguments that it may change, such as caches."""
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[Value] = []
    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            parts.append((tuple(leaf.shape), leaf.dtype))
        elif leaf is None or isinstance(leaf, int | float | str | torch.dtype):
            parts.append(leaf)
        else:
            return None
    return owner, str(spec), tuple(parts), circumstances()
