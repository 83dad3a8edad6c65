"""Rollouts in two stages: texts of the prompts, then images of the texts. What engines of such rollouts share."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from unirl.rollout.engine.base import BaseDiffusionEngine
from unirl.types.batch import rows_by
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Primitive, Texts
from unirl.types.noise import noise_keys
from unirl.types.protocols.engines import DiffusionRolloutEngine, TextRolloutEngine
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, ComposedSamplingParams, DiffusionSamplingParams

IMAGE = "image"
"""Its first letter stands before the number of an image in its id."""

Size = tuple[int, int]
"""Height and width in pixels."""

Inputs = Mapping[str, Primitive]
"""By slot, one entry per row."""


class TwoStageEngine(BaseDiffusionEngine):
    """P prompts become P x N texts and P x N x M images.

    The texts are the root track, grouped by prompt; the images grow from them by `RolloutTrack.fork`, M of each, and
    are grouped by their text. A scorer sees what the user asked for, which the root holds. A request for texts or for
    images alone goes to the one engine.
    Counted of every image: `cut_tokens` of its prompt that the painter does not read.
    """

    def __init__(self, writer: TextRolloutEngine, painter: DiffusionRolloutEngine, painting: DiffusionPipeline) -> None:
        self._writer = writer
        self._painter = painter
        self._painting = painting

    @abstractmethod
    def _copies(self, policy: str | None) -> tuple[str | None, str | None]:
        """The copies of the weights that texts and images are sampled from."""

    @abstractmethod
    def _writer_reads(self, req: RolloutReq) -> dict[str, Primitive]:
        """The request's inputs as the writer gets them."""

    @abstractmethod
    def _painter_reads(self, written: RolloutTrack, req: RolloutReq) -> tuple[RolloutTrack, dict[str, Primitive]]:
        """The texts with what is counted of them, and the painter's inputs, one row per text."""

    def _sizes(self, written: RolloutTrack, params: DiffusionSamplingParams) -> list[Size] | None:
        """Height and width of the images of each text; None where all have those of `params`."""
        del written, params
        return None

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: ComposedSamplingParams | DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel of the painter."""
        return self._painter.plan(params.diffusion if isinstance(params, ComposedSamplingParams) else params)

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where the writer cannot read a prompt."""
        self._writer.check_prompts(req.replace(primitives=self._writer_reads(req)))

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Texts of every row of this rank's request, and images of the texts.

        policy: see `_copies`. Raises what the engines raise, and ContractError for a request of another kind.
        """
        writer, painter = self._copies(policy)
        match req.sampling_params:
            case ComposedSamplingParams() as params:
                written, name = self._written(req, params.ar, writer)
                written, inputs = self._painter_reads(written, req)
                drawn, child = self._drawn(req, params.diffusion, (written, name), inputs, painter)
                return RolloutResp(tracks={name: written, child: drawn})
            case DiffusionSamplingParams() as params:
                resp = self._painter.generate(req, painter)
                return self._counted(resp, resp.root_name(), texts_of(req.primitives), params)
            case ARSamplingParams() as params:
                written, name = self._written(req, params, writer)
                return RolloutResp(tracks={name: written})
            case other:
                raise ContractError(f"this engine makes texts and images, the request has {type(other).__name__}")

    def _written(self, req: RolloutReq, params: ARSamplingParams, policy: str | None) -> tuple[RolloutTrack, str]:
        """The writer's track and its name, with what the user asked for."""
        asked = req.replace(
            primitives=self._writer_reads(req),
            sampling_params=params,
            sigmas=None,
            init_noise_group_ids=[],
            init_noise_latent_shape=None,
        )
        resp = self._writer.generate(asked, policy)
        return resp.root_track().replace(primitives=dict(req.primitives)), resp.root_name()

    def _drawn(
        self,
        req: RolloutReq,
        params: DiffusionSamplingParams,
        parent: tuple[RolloutTrack, str],
        inputs: Inputs,
        policy: str | None,
    ) -> tuple[RolloutTrack, str]:
        """The painter's track and its name, grown from `parent`; inputs: one row of each parent sample."""
        written, name = parent
        branch = params.samples_per_prompt
        children = written.fork(name, IMAGE, branch)
        repeated = {slot: value.repeat_interleave(branch) for slot, value in inputs.items()}
        asked = RolloutReq(
            sample_ids=children.sample_ids,
            group_ids=children.group_ids,
            primitives=repeated,
            sampling_params=params,
            stage_config=req.stage_config,
            sigmas=req.sigmas,
            init_noise_group_ids=noise_keys(
                req.rollout_id, children.sample_ids, children.group_ids, same_noise=params.init_same_noise
            ),
            init_noise_latent_shape=req.init_noise_latent_shape,
            rollout_id=req.rollout_id,
        )
        sizes = self._sizes(written, params)
        if sizes is None:
            resp = self._painter.generate(asked, policy)
        else:
            resp = self._drawn_by_size(asked, params, [size for size in sizes for _ in range(branch)], policy)
        child = resp.root_name()
        if child == name:
            raise ConfigError(f"both engines call their track {name!r}. Set the `track` of one of them.")
        track = self._counted(resp, child, texts_of(repeated), params).root_track()
        return dataclasses.replace(track, parent_track=name, parent_ids=list(children.group_ids)), child

    def _drawn_by_size(
        self, req: RolloutReq, params: DiffusionSamplingParams, sizes: Sequence[Size], policy: str | None
    ) -> RolloutResp:
        """Images whose rows have these sizes: the painter is asked once for each size, in order of first appearance."""
        drawn, name = [], ""
        for (height, width), own in rows_by(sizes).items():
            of_size = dataclasses.replace(params, height=height, width=width)
            shape = list(self._painting.latent_shape(of_size))
            asked = req.select(own).replace(sampling_params=of_size, init_noise_latent_shape=shape)
            resp = self._painter.generate(asked, policy)
            name = resp.root_name()
            drawn.append((own, resp.root_track().sized(params)))
        return RolloutResp(tracks={name: RolloutTrack.concat_rows(drawn)})

    def _counted(
        self, resp: RolloutResp, track: str, texts: Sequence[str], params: DiffusionSamplingParams
    ) -> RolloutResp:
        distinct = list(dict.fromkeys(texts))
        cut = dict(zip(distinct, self._painting.cut_tokens(distinct, params), strict=True))
        return resp.with_values(track, counts={"cut_tokens": torch.tensor([float(cut[text]) for text in texts])})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Both engines."""
        for engine in (self._writer, self._painter):
            engine.sleep()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Both engines."""
        for engine in (self._writer, self._painter):
            engine.wake_up()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """Both engines."""
        for engine in (self._writer, self._painter):
            engine.shutdown()


def texts_of(inputs: Inputs) -> list[str]:
    """The texts in the slot "text". Raises ContractError where there are none."""
    texts = inputs.get("text")
    if not isinstance(texts, Texts):
        raise ContractError(f"a request for two stages needs primitives['text'], it has {sorted(inputs)}")
    return texts.texts


def decoded_texts(written: RolloutTrack) -> list[str]:
    """What a writer wrote. Raises ContractError where that is no text."""
    if not isinstance(written.decoded, Texts):
        raise ContractError(f"the writer made {type(written.decoded).__name__}, a painter draws Texts")
    return written.decoded.texts
