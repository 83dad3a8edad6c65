"""HunyuanImage3 as the pipelines that recipes name: images, and the texts before them or about them."""

from __future__ import annotations

import torch

from unirl.models.adapter import num_rows, require_condition, select_rows
from unirl.models.ar import ReplayedTokens
from unirl.models.hunyuan_image3.adapter import HunyuanImage3Adapter
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.text_adapter import HunyuanImage3TextAdapter, Task
from unirl.models.kept_experts import EXPERTS, check_experts, require_dict
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import ExpertCondition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment, TextSegment

PUBLISHED_SHIFT = 3.0


@bounded("pipeline")
class HunyuanImage3Pipeline(DiffusionPipeline):
    """Images of a prompt, of a prompt and a thought, or of given images, see `unirl.models.pipeline.DiffusionPipeline`.

    schedule: None is linspace(1, 0, T + 1) shifted by 3, as published. vLLM-Omni shifts its own levels twice.
    system_prompt, decode_batch_size: see `HunyuanImage3Adapter`. forward_batch_size: see the base.
    replays_experts: keep with each rollout to which experts the tokens of its stochastic steps go, and those of the
        words before them, and send them there again in every replay. They are those of one more forward of each such
        step, at the weights of the rollout; a sample has 2 bytes of each token, step, block and expert.
    """

    adapter: HunyuanImage3Adapter

    def __init__(
        self,
        bundle: HunyuanImage3Bundle,
        strategy: SDEStrategy,
        schedule: SigmaSchedule | None = None,
        *,
        system_prompt: str | None = None,
        decode_batch_size: PositiveInt = 1,
        forward_batch_size: PositiveInt | None = None,
        replays_experts: bool = False,
    ) -> None:
        adapter = HunyuanImage3Adapter(bundle, system_prompt=system_prompt, decode_batch_size=decode_batch_size)
        levels = SigmaSchedule("linear", shift=PUBLISHED_SHIFT) if schedule is None else schedule
        super().__init__(adapter, strategy, levels, forward_batch_size=forward_batch_size)
        self._replays_experts = replays_experts

    def remember(self, conditions: Conditions, segment: LatentSegment, params: DiffusionSamplingParams) -> None:
        """Where experts are replayed and steps are stochastic, adds their slot to `conditions`, which must then be a
        dict."""
        if self._replays_experts and segment.own_steps is not None:
            raise ConfigError(
                "replays_experts keeps the experts of the same steps of all samples. Set sampling.one_step: null, or "
                "replays_experts: false."
            )
        if self._replays_experts and segment.sde_indices:
            require_dict(conditions)[EXPERTS] = self.experts(conditions, segment, params)

    @torch.no_grad()
    def experts(
        self, conditions: Conditions, segment: LatentSegment, params: DiffusionSamplingParams
    ) -> ExpertCondition:
        """The experts of words and stochastic steps, under the present weights, in forwards of `forward_batch_size`."""
        free = {slot: value for slot, value in conditions.items() if slot != EXPERTS}
        count = num_rows(free)
        size = self.forward_batch_size or count
        is_mixed = params.autocast_precision != "fp32"
        dtype = DTYPES[params.autocast_precision] if is_mixed else None
        found = []
        for rows in torch.arange(count).split(size):
            bound = self.adapter.keeping_experts(select_rows(free, rows.tolist()), params)
            for step in segment.sde_indices:
                steps = torch.full_like(rows, step)
                x_R, _, sigma_R, _ = segment.transitions(rows, steps)
                with torch.autocast(x_R.device.type, dtype=dtype, enabled=is_mixed):
                    bound(x_R, sigma_R, steps)
            found.append(bound.experts)
        return ExpertCondition.concat(found)


class HunyuanImage3TextPipeline(AutoregressivePipeline):
    """Thoughts, captions and answers, see `unirl.models.text_pipeline.AutoregressivePipeline`.

    task, system_prompt, chooses_size: see `HunyuanImage3TextAdapter`.
    replays_experts: keep with each rollout to which experts its tokens go, and send them there again in every replay,
        so that a ratio does not jump where an update moves a token from one expert to another. The experts are those
        of one more forward of all tokens, at the weights of the rollout.
    """

    adapter: HunyuanImage3TextAdapter

    def __init__(
        self,
        bundle: HunyuanImage3Bundle,
        *,
        task: Task = "answer",
        system_prompt: str | None = None,
        chooses_size: bool = False,
        replays_experts: bool = False,
    ) -> None:
        super().__init__(
            HunyuanImage3TextAdapter(bundle, task=task, system_prompt=system_prompt, chooses_size=chooses_size)
        )
        self._replays_experts = replays_experts

    def remember(self, conditions: Conditions, segment: TextSegment) -> None:
        """Where experts are replayed, adds their slot to `conditions`, which must then be a dict."""
        if self._replays_experts:
            require_dict(conditions)[EXPERTS] = self.experts(conditions, segment)

    @torch.no_grad()
    def experts(self, conditions: Conditions, segment: TextSegment) -> ExpertCondition:
        """The experts of every token that a replay reads, under the present weights."""
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        rows = [torch.cat([prompt, said[:-1]]) for prompt, said in zip(prompts, segment.unpack("tokens"), strict=True)]
        bundle = self.adapter.bundle
        found = bundle.model.experts(rows, **self.adapter.model_inputs(conditions))
        return ExpertCondition.pack(experts=list(found.split([len(row) for row in rows])))

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> ReplayedTokens:
        """See `AutoregressivePipeline.replay`. Raises ContractError for experts of another batch."""
        check_experts(conditions, segment)
        return super().replay(conditions, segment, params)
