"""A user's own Python function as a scorer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from unirl.reward.base import SAMPLE_ERRORS, LocalScorer, raised_at
from unirl.reward.card import ScorerCard
from unirl.types.batch import rows_by
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError, ContractError, UniRLError, as_sentence
from unirl.types.media import Audios, Images, Texts, Videos
from unirl.types.reward import RewardRequest
from unirl.types.samples import Sound

RewardFunction = Callable[..., Any]
"""f(images, prompts, metadata, **kwargs) -> one number per sample (list, array or tensor [b]), or a dict of these."""


class FunctionRewardScorer(LocalScorer):
    """Calls `function(images, prompts, metadata, **kwargs)` on every batch, or with `groupwise` on every group.

    function: a callable, or its dotted path, "my_package.rewards.brightness".
    images: tensor [b, C, H, W] in [0, 1]; for videos a list of [T, C, H, W], for texts a list of str, for sounds a list
    of `unirl.types.samples.Sound`, which has `waveform` ([L] or [L, C]) and `rate`.
    prompts: list of str. metadata: list of dict, the sample's row of the data file (empty where there is none).
    The function returns b numbers, or a dict of these with the keys of `component_weights`, whose weighted sum is the
    reward. None or a non-finite number says that a sample could not be scored.
    latents: the first argument is instead the clean latents of the samples, float32 [b, ...] as the model has them,
    which needs no decoded media (`engine.decode: false`).
    groupwise: call it once per group, with all samples of one prompt, where a score depends on the others.
    kwargs: passed on to the function.
    Raises ConfigError if the dotted path leads nowhere, and for keywords that the function does not take or lacks.
    """

    card = ScorerCard(
        name="function",
        summary="a Python function of your own",
        media=("image", "video", "text", "audio"),
        typical="as the function gives",
        source="yours",
    )
    keywords_of: ClassVar[str] = "function"
    """The argument that says which function takes `kwargs`; `trainer check` reads that function's signature."""
    num_inputs: ClassVar[int] = 3
    """Arguments that the function gets from the samples."""

    def __init__(
        self,
        function: RewardFunction | str,
        *,
        name: str | None = None,
        batch_size: PositiveInt = 8,
        device: str = "cpu",
        component_weights: Mapping[str, float] | None = None,
        groupwise: bool = False,
        latents: bool = False,
        **kwargs: Any,  # Any: the user's own keywords
    ) -> None:
        self._function = UserFunction(function, self.num_inputs, kwargs)
        super().__init__(
            name=name if name is not None else self._function.name.rpartition(".")[2],
            batch_size=batch_size,
            device=device,
            component_weights=component_weights,
        )
        self.is_groupwise = groupwise
        self.reads_media = not latents

    @property
    def source_file(self) -> str | None:
        """The function's own."""
        return self._function.source_file

    def score_batch(self, request: RewardRequest) -> Tensor | Mapping[str, Tensor]:
        """The function's numbers.

        Raises ContractError naming the function if it returned something else, and with file and line where it
        raised what no sample is the reason of (TypeError, NameError, ...).
        """
        if not self.is_groupwise:
            return self._scores(request)
        # The function knows nothing of groups: it gets one at a time.
        groups = list(rows_by(request.group_ids).values())
        places_b = torch.tensor([row for rows in groups for row in rows]).argsort()
        found = [self._named(self._scores(request.select(rows)), len(rows)) for rows in groups]
        joined = {key: torch.cat([values[key].cpu() for values in found])[places_b] for key in self._keys()}
        return joined if self.component_weights else joined[self.name]

    def _scores(self, request: RewardRequest) -> Tensor | Mapping[str, Tensor]:
        seen = media_of(request) if self.reads_media else self._latents(request)
        found = self._function(seen, request.prompts, metadata_of(request))
        if isinstance(found, Mapping):
            return {str(key): self._function.numbers(value) for key, value in found.items()}
        return self._function.numbers(found)

    def _latents(self, request: RewardRequest) -> Tensor:
        if request.latents is None:
            raise ContractError(
                f"scorer {self.name} scores latents, and this request has none: its samples were not denoised here"
            )
        return request.latents.float()


class UserFunction:
    """A user's function with its keywords, whose mistakes are told by its name.

    function: a callable, or its dotted path. num_inputs: arguments that it gets from the samples. unit: what it gives
    one number of.
    Raises ConfigError if the dotted path leads nowhere, and for keywords that the function does not take or lacks.
    """

    def __init__(
        self,
        function: RewardFunction | str,
        num_inputs: int,
        keywords: Mapping[str, Any],  # Any: the user's own keywords
        *,
        unit: str = "sample",
    ) -> None:
        self.function = imported(function) if isinstance(function, str) else function
        if not callable(self.function):
            raise ConfigError(f"function = {function!r} is a {type(self.function).__name__}, which cannot be called")
        self.name = function if isinstance(function, str) else _name_of(self.function)
        self.keywords = keywords
        self._unit = unit
        _check_keywords(self.function, self.name, num_inputs, keywords)

    @property
    def source_file(self) -> str | None:
        """The file that it is written in."""
        function = inspect.unwrap(self.function)
        return function.__code__.co_filename if isinstance(function, FunctionType) else None

    def __call__(self, *inputs: Any) -> Any:  # Any: whatever a user's function takes and returns
        """What it returns. Raises ContractError with file and line where it raised what no sample is the reason of."""
        try:
            return self.function(*inputs, **self.keywords)
        except (*SAMPLE_ERRORS, UniRLError):
            raise
        except Exception as error:
            raise ContractError(
                f"reward function {self.name} raised {type(error).__name__}: {error} "
                f"({raised_at(error, self.source_file)})"
            ) from error

    def numbers(self, value: Any) -> Tensor:  # Any: whatever a user's function returns
        """Its numbers as a tensor, NaN for None. Raises ContractError for anything else."""
        if isinstance(value, (Tensor, np.ndarray)):
            return torch.as_tensor(value)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            try:
                return torch.tensor([torch.nan if item is None else float(item) for item in value])
            except (TypeError, ValueError) as error:
                raise ContractError(self._complaint(value)) from error
        raise ContractError(self._complaint(value))

    def _complaint(self, value: Any) -> str:  # Any: whatever a user's function returns
        return (
            f"reward function {self.name} returned {type(value).__name__} {str(value)[:80]!r}; "
            f"it must return one number per {self._unit} (list, array or tensor)"
            f"{', or a dict of these' if self._unit == 'sample' else ''}"
        )


def imported(path: str) -> RewardFunction:
    """The object at a dotted path. Raises ConfigError if the module or the name does not exist."""
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ConfigError(f"function = {path!r} must be a dotted path such as my_package.rewards.brightness")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"function = {path!r}: {as_sentence(error)} Install it or put its folder on PYTHONPATH."
        ) from error
    if attribute not in vars(owner):
        public = sorted(name for name, value in vars(owner).items() if callable(value) and not name.startswith("_"))
        raise ConfigError(f"function = {path!r}: module {module} has no {attribute!r}; it has {public[:8]}")
    return vars(owner)[attribute]


def _check_keywords(function: RewardFunction, name: str, num_inputs: int, keywords: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin without a readable signature checks for itself
    try:
        signature.bind(*(None,) * num_inputs, **keywords)
    except TypeError as error:
        inputs = "(images, prompts, metadata)" if num_inputs == 3 else f"{num_inputs} inputs"
        raise ConfigError(
            f"reward function {name}{signature} cannot be called with {inputs} and the keywords "
            f"{sorted(keywords)}: {as_sentence(error)} Change the function or the keywords."
        ) from error


def _name_of(function: RewardFunction) -> str:
    """A function's own name; partials and callable objects go by their type."""
    return function.__name__ if isinstance(function, FunctionType) else type(function).__name__


def metadata_of(request: RewardRequest) -> list[dict[str, Any]]:  # Any: rows of a user's data file
    """The row of the data file of each sample, empty where there is none."""
    return [row if row is not None else {} for row in request.metadata] or [{} for _ in request.sample_ids]


def media_of(request: RewardRequest) -> Tensor | list[Tensor] | list[str] | list[Sound]:
    """The generated medium as functions take it. Raises ContractError unless there is exactly one."""
    if len(request.generated) != 1:
        raise ContractError(f"a reward function takes one generated medium; the request has {list(request.generated)}")
    media = next(iter(request.generated.values()))
    if isinstance(media, Images):
        return media.pixels
    if isinstance(media, Videos):
        return media.unpack("frames")
    if isinstance(media, Texts):
        return media.texts
    if isinstance(media, Audios):
        return [Sound(waveform, media.sample_rate) for waveform in media.unpack("waveform")]
    raise ContractError(f"a reward function takes images, videos, texts or sounds, not {type(media).__name__}")
