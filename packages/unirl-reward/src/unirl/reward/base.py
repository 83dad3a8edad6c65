"""The base of scorers that run in this process: batching, device, checks, and which sample failed.

Legend: B samples of a request, b samples of one batch, C channels, H W pixels.
"""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from unirl.reward.card import ScorerCard
from unirl.reward.compose import composed
from unirl.reward.grouping import fail_groups, whole_groups
from unirl.types.batch import rows_by
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.devices import empty_cache
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Audios, Images, Videos
from unirl.types.reward import RewardRequest, RewardResponse

Isolation = Literal["none", "batch", "sample"]
"""How far a failure spreads: `none` raises at once, `batch` fails the samples of that batch, `sample` scores the
samples of a failed batch one by one, or group by group where these are compared, and fails only those that fail
alone."""

SAMPLE_ERRORS = (ArithmeticError, LookupError, OSError, RuntimeError, ValueError)
"""What a scorer may raise because of its samples or its machine. TypeError, NameError, ImportError and the like are
bugs of the code and are never isolated, nor are ConfigError and ContractError."""

_NON_FINITE = "its generated media holds non-finite numbers"
_MAX_NAMED = 4
"""Failed samples that a message names; it counts the rest."""


@dataclass(frozen=True)
class Scored:
    """Values of b samples as `score_batch` gives them, and why a sample whose value is NaN has none."""

    values: Tensor | Mapping[str, Tensor]
    reasons: Sequence[str | None]


@bounded("scorer")
class LocalScorer(ABC):
    """Scores samples in this process, `batch_size` at a time.

    name: how results and messages call it; no "/", which separates scorer and component.
    batch_size: most samples of one `score_batch` call; a scorer that compares groups gets whole ones, at least one.
    device: where modules live and where media are moved before `score_batch`.
    component_weights: component -> weight, for a scorer that returns several values; its reward is their weighted
    sum. Empty: the scorer returns one tensor, which is the reward.
    normalise: bring the reward near [0, 1] as published, by `card.normalisation`; components stay raw.
    A differentiable scorer sets `is_differentiable` and implements `score_batch_with_gradient`.
    Raises ConfigError for an impossible value.
    """

    is_differentiable: ClassVar[bool] = False
    """True if `score_with_gradient` works."""
    reads_media: bool = True
    """True if it needs what was generated; False for a scorer of `RewardRequest.latents`, or of inputs alone, which
    also scores where nothing is decoded (`engine.decode: false`)."""
    prompt_grammar: ClassVar[str | None] = None
    """Import path of the function that raises ValueError for a prompt that it cannot judge, so that `trainer check` can
    ask it of a data file; its module imports no heavy library. None judges any prompt."""
    reads_prompt: ClassVar[bool] = True
    """False if it judges what was generated whatever was asked for; a reward of such scorers alone is warned about."""
    is_groupwise: bool = False
    """True if a sample's score depends on the others of its group. A batch is then one or several whole groups, and a
    sample that fails takes its group with it."""
    model_billions: ClassVar[float] = 0.0
    """Billions of parameters of its own model, which `trainer check --memory` counts; 0 where it has none."""
    card: ClassVar[ScorerCard | None] = None
    """Input, range, scale and source; `unirl.reward.catalog` lists the scorers of the package by it."""

    def __init__(
        self,
        *,
        name: str,
        batch_size: PositiveInt = 8,
        device: str = "cpu",
        component_weights: Mapping[str, float] | None = None,
        normalise: bool = False,
    ) -> None:
        if not name or "/" in name:
            raise ConfigError(f"a scorer cannot be called {name!r}; use a name without '/'")
        weights = dict(component_weights or {})
        wrong = {key: weight for key, weight in weights.items() if not math.isfinite(weight)}
        if wrong:
            raise ConfigError(f"scorer {name}: component_weights must be finite numbers, got {wrong}")
        if weights and not any(weights.values()):
            raise ConfigError(f"scorer {name}: every component weight is 0, so its reward would be 0. Set one.")
        self._normalisation = self.card.normalisation if normalise and self.card is not None else None
        if normalise and self._normalisation is None:
            raise ConfigError(
                f"scorer {name}: normalise is on, but {type(self).__name__} has no published normalisation. Leave it "
                "off, and set its weight in reward.weights."
            )
        self.name = name
        self.batch_size = batch_size
        self.device = device
        self.component_weights = weights
        self.is_offloaded = False

    @abstractmethod
    def score_batch(self, request: RewardRequest) -> Tensor | Mapping[str, Tensor] | Scored:
        """Values of b samples whose media lie on `self.device`.

        A tensor [b], or a mapping with exactly the keys of `component_weights` to tensors [b]; `Scored` adds reasons.
        A sample that cannot be scored gets NaN or makes the call raise one of SAMPLE_ERRORS; it never gets an
        invented number.
        """

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor | Mapping[str, Tensor]:
        """As `score_batch`, with gradients to the pixels of the request's images and none to parameters.

        Raises ConfigError if the scorer is not differentiable.
        """
        raise ConfigError(
            f"scorer {self.name} ({type(self).__name__}) is not differentiable. Train on one that is, or give this "
            "scorer the weight 0 in reward.weights, so that it only reports."
        )

    @property
    def source_file(self) -> str | None:
        """The file whose line messages name where scoring raises; None: where it was raised, in whatever library."""
        return type(self).score_batch.__code__.co_filename

    def modules(self) -> list[nn.Module]:
        """The modules that offloading moves. Models override it; rules have none."""
        return []

    def move_to(self, device: str) -> None:
        """Make `device` the device of a scorer with modules and move them there. Rules stay where they are."""
        if self.modules():
            self.device = device
            self.onload()

    def offload(self) -> None:
        """Move the modules to host memory and free the device's cache. Scoring is an error until `onload`."""
        for module in self.modules():
            module.to("cpu")
        if self.modules():
            empty_cache(self.device)
        self.is_offloaded = True

    def onload(self) -> None:
        """Move the modules to `device`."""
        for module in self.modules():
            module.to(self.device)
        self.is_offloaded = False

    def score(self, request: RewardRequest) -> RewardResponse:
        """Rewards [B] with every component. Raises RewardError at the first sample without a finite value."""
        return self.score_isolated(request, "none")

    def score_isolated(
        self, request: RewardRequest, isolation: Isolation, *, is_private: bool = False
    ) -> RewardResponse:
        """As `score`, with failures isolated: a failed sample has success False, an error text and NaN values.

        is_private: no other scorer reads the request, so samples that make one batch reach the scorer without a copy.
        Components are called `name/component` where there are several, `name` otherwise.
        Raises RewardError under isolation "none", or while offloaded; ContractError for a request without samples.
        """
        self._check_ready(request)
        num_samples = len(request.sample_ids)
        values = {key: torch.full((num_samples,), torch.nan) for key in self._keys()}
        errors: list[str | None] = [None] * num_samples
        for row in _non_finite_media(request):
            errors[row] = _NON_FINITE
        self._raise_if(errors, request.sample_ids, isolation)
        self._fail_groups(request, values, errors)
        # A batch keeps its place when a sample before it fails, so that no value depends on other batches.
        for batch in self.batches(request):
            if rows := [row for row in batch if errors[row] is None]:
                is_whole = is_private and rows == list(range(num_samples))
                self._score_rows(
                    request, request if is_whole else request.select(rows), rows, isolation, values, errors
                )
        self._fail_groups(request, values, errors)
        return RewardResponse(
            sample_ids=list(request.sample_ids),
            rewards=self._reward(values),
            component_rewards=self._components(values),
            successes=[error is None for error in errors],
            errors=errors,
        )

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """Rewards float32 [B] whose gradient flows to the pixels of the request's images or videos, on their device.

        Pixels are float in [0, 1]; `batch_size` samples are scored at a time, and the activations of all
        stay in memory until backward. Values equal those of `score` but for the rounding of pixels to bytes there.
        Raises ConfigError if the scorer is not differentiable, RewardError for pixels or values that are not finite
        and while offloaded.
        """
        self._check_ready(request)
        bad = {request.sample_ids[row]: _NON_FINITE for row in _non_finite_media(request)}
        if bad:
            raise RewardError(describe_failures(self.name, bad))
        batches = self.batches(request)
        found = [
            self._named(self.score_batch_with_gradient(request.select(batch).to(self.device)), len(batch))
            for batch in batches
        ]
        values = {key: torch.cat([values_b[key] for values_b in found]) for key in self._keys()}
        if self.is_groupwise:
            places_B = torch.tensor([row for batch in batches for row in batch]).argsort()
            values = {key: value[places_B.to(value.device)] for key, value in values.items()}
        rewards_B = self._reward(values).float()
        is_finite_B = rewards_B.isfinite()
        if not is_finite_B.all():
            wrong = (~is_finite_B).nonzero().flatten().tolist()
            reasons = {request.sample_ids[row]: f"its value is {rewards_B[row].item()}" for row in wrong}
            raise RewardError(describe_failures(self.name, reasons))
        return rewards_B.to(device_of(request))

    def batches(self, request: RewardRequest) -> list[list[int]]:
        """The rows of each `score_batch` call. Raises ContractError if groups are compared and the request has none."""
        num_samples = len(request.sample_ids)
        if not self.is_groupwise:
            starts = range(0, num_samples, self.batch_size)
            return [list(range(start, min(start + self.batch_size, num_samples))) for start in starts]
        if not request.group_ids:
            raise ContractError(f"scorer {self.name} compares samples of a group; the request has no group_ids")
        return whole_groups(request.group_ids, self.batch_size)

    def _fail_groups(self, request: RewardRequest, values: dict[str, Tensor], errors: list[str | None]) -> None:
        """Where groups are compared: take the values of every sample whose group has an error."""
        if self.is_groupwise and any(errors):
            fail_groups(request.sample_ids, request.group_ids, errors, "cannot be compared")
            rows = [row for row, error in enumerate(errors) if error is not None]
            for value_B in values.values():
                value_B[rows] = torch.nan

    def _check_ready(self, request: RewardRequest) -> None:
        if not request.sample_ids:
            raise ContractError(f"scorer {self.name} got a request without sample_ids")
        if self.is_offloaded:
            raise RewardError(f"scorer {self.name} is offloaded; call onload() before scoring")
        media = () if self.card is None else self.card.media
        if self.reads_media and not (set(media) & set(request.generated) if media else request.generated):
            raise ContractError(
                f"scorer {self.name} scores generated {' or '.join(media) or 'media'}; this request has "
                f"{sorted(request.generated) or 'nothing'}"
            )

    @torch.no_grad()
    def _score_rows(
        self,
        request: RewardRequest,
        chosen: RewardRequest,
        rows: list[int],
        isolation: Isolation,
        values: dict[str, Tensor],
        errors: list[str | None],
    ) -> None:
        """Write values and errors of `rows`, one batch, which `chosen` holds."""
        ids = [request.sample_ids[row] for row in rows]
        try:
            scored = self.score_batch(chosen.to(self.device).in_floats())
            reasons = list(scored.reasons) if isinstance(scored, Scored) else [None] * len(rows)
            named = self._named(scored.values if isinstance(scored, Scored) else scored, len(rows))
            found = {key: value.detach().to("cpu", torch.float32) for key, value in named.items()}
        except (ConfigError, ContractError):
            raise
        except SAMPLE_ERRORS as error:
            reason = f"{type(error).__name__}: {error} ({raised_at(error, self.source_file)})"
            if isolation == "none":
                raise RewardError(f"scorer {self.name} failed on samples {_listed(ids)}: {reason}") from error
            parts = list(rows_by(request.group_ids[row] if self.is_groupwise else row for row in rows).values())
            if isolation == "sample" and len(parts) > 1:
                for part in parts:
                    own = [rows[place] for place in part]
                    self._score_rows(request, request.select(own), own, isolation, values, errors)
                return
            for row in rows:
                errors[row] = reason
            return
        for key, value_b in found.items():
            values[key][rows] = value_b
            for position in (~value_b.isfinite()).nonzero().flatten().tolist():
                label = f"component {key} is" if self.component_weights else "value is"
                errors[rows[position]] = reasons[position] or f"its {label} {value_b[position].item()}"
        self._raise_if([errors[row] for row in rows], ids, isolation)

    def _raise_if(self, errors: list[str | None], ids: list[str], isolation: Isolation) -> None:
        if isolation != "none":
            return
        failed = {name: error for name, error in zip(ids, errors, strict=True) if error is not None}
        if failed:
            raise RewardError(describe_failures(self.name, failed))

    def _keys(self) -> list[str]:
        return list(self.component_weights) or [self.name]

    def _named(self, found: Tensor | Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """Values [b] by key. Raises ContractError if the scorer broke its own contract."""
        if isinstance(found, Tensor):
            found = {self.name: found}
            if self.component_weights:
                raise ContractError(
                    f"scorer {self.name} returned one tensor but has component_weights for "
                    f"{list(self.component_weights)}; return a mapping with these keys"
                )
        if set(found) != set(self._keys()):
            raise ContractError(
                f"scorer {self.name} returned components {sorted(found)} but declares {sorted(self._keys())}. "
                "Make component_weights name every component that it returns."
            )
        for key, value in found.items():
            if value.shape != (num_samples,):
                raise ContractError(
                    f"scorer {self.name} returned {key} of shape {tuple(value.shape)} for {num_samples} samples; "
                    f"expected ({num_samples},). Return one number per sample: of images, say, reduce the other "
                    "dimensions by values.mean(dim=(1, 2, 3))."
                )
        return dict(found)

    def _reward(self, values: dict[str, Tensor]) -> Tensor:
        raw = composed(values, self.component_weights) if self.component_weights else values[self.name]
        return raw if self._normalisation is None else self._normalisation(raw)

    def _components(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.component_weights:
            return {self.name: self._reward(values).clone()}
        return {f"{self.name}/{key}": value for key, value in values.items()}


def raised_at(error: BaseException, file: str | None) -> str:
    """ "name:line" of the innermost frame of `file` that the error came through, of all frames where there is none.

    The file's name without its folders: a reward server sends such reasons to its clients.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([each for each in frames if each.filename == file] or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def describe_failures(scorer: str, failed: Mapping[str, str]) -> str:
    """One sentence naming the scorer, the samples that failed (sample id -> reason) and why."""
    shown = [f"{name}: {reason}" for name, reason in list(failed.items())[:_MAX_NAMED]]
    more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
    what = f"{len(failed)} sample{'s' if len(failed) > 1 else ''}"
    return (
        f"scorer {scorer} has no finite reward for {what} ({'; '.join(shown)}{more}). "
        "Fix the scorer or its input, or set on_failure to retry or drop_group."
    )


def _listed(ids: list[str]) -> str:
    more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    return ", ".join(ids[:_MAX_NAMED]) + more


def device_of(request: RewardRequest) -> torch.device:
    """Where the generated images, videos or sounds live; the CPU where there are none."""
    for media in request.generated.values():
        if isinstance(media, Audios):
            return media.waveform.device
        if isinstance(media, (Images, Videos)):
            return (media.pixels if isinstance(media, Images) else media.frames).device
    return torch.device("cpu")


def _non_finite_media(request: RewardRequest) -> list[int]:
    """Rows whose generated pixels hold NaN or infinity, which conversion to bytes would hide, or whose sound does."""
    rows: set[int] = set()
    for media in request.generated.values():
        if isinstance(media, Audios):
            waveforms = enumerate(media.unpack("waveform"))
            rows.update(row for row, waveform in waveforms if not waveform.isfinite().all())
        if isinstance(media, (Images, Videos)):
            pixels = list(media.pixels) if isinstance(media, Images) else media.unpack("frames")
            if not all(each.is_floating_point() for each in pixels):
                continue  # bytes, whose sum would be taken over a copy of eight bytes each
            # A finite sum has finite terms only, at a twentieth of the cost of looking at each.
            sums = torch.stack([each.sum() for each in pixels]).isfinite().tolist()
            rows.update(row for row, is_finite in enumerate(sums) if not (is_finite or pixels[row].isfinite().all()))
    return sorted(rows)
