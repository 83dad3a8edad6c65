"""vLLM-Omni's own HunyuanImage3, in its own interpreter: `python omni_hunyuan_image3.py FOLDER STAGES REQUESTS OUT`.

STAGES: its deployment file. REQUESTS: JSON of {"images": name -> {"prompt": what vLLM-Omni takes, "height", "width",
"guidance", "levels": None for its own}, "words": ids, "seed", "num_steps"}.
OUT: safetensors of "NAME.latents" [T + 1, C, h, w], "NAME.velocity" [T, C, h, w], "NAME.sigmas" [T + 1] and "NAME.ids"
[rows, N] of every image, and "logits" [N, V] of the words.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_MODELS = "vllm_omni.diffusion.models.hunyuan_image3"
_NATIVE: Any = importlib.import_module(f"{_MODELS}.pipeline_hunyuan_image3")
_PARTS: Any = importlib.import_module(f"{_MODELS}.hunyuan_image3_transformer")
_forward_context: Any = importlib.import_module("vllm.forward_context").set_forward_context
_OUTPUT: Any = importlib.import_module("vllm_omni.diffusion.data").DiffusionOutput


class RecordingScheduler(_NATIVE.HunyuanImage3FlowMatchEulerDiscreteScheduler):
    """Remembers what it was given. `levels`: before the shift, in its own place."""

    levels: list[float] | None = None

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, **given: Any) -> None:
        self.latents: list[torch.Tensor] = []
        self.velocities: list[torch.Tensor] = []
        if self.levels is None:
            super().set_timesteps(num_inference_steps, device=device, **given)
        else:
            super().set_timesteps(sigmas=self.levels, device=device)

    def step(self, model_output: Any, timestep: Any, sample: Any, **given: Any) -> Any:
        if not self.latents:
            self.latents.append(sample)
        stepped = super().step(model_output, timestep, sample, **given)
        self.velocities.append(model_output)
        self.latents.append(stepped[0])
        return stepped


class Recorded(_NATIVE.HunyuanImage3Pipeline):
    """Its own pipeline, which says what it did."""

    def forward(self, req: Any, *args: Any, **given: Any) -> Any:
        asked = req.sampling_params.extra_args or {}
        if "words" in asked:
            return self._scored(asked["words"])
        scheduler = RecordingScheduler.from_config(self.pipeline.scheduler.config)
        scheduler.levels = asked["levels"]
        self.pipeline.set_scheduler(scheduler)
        out = super().forward(req, *args, **given)
        out.trajectory_latents = {
            "latents": torch.cat(scheduler.latents),
            "velocity": torch.cat(scheduler.velocities),
            "sigmas": scheduler.sigmas,
            "ids": self.read,
        }
        return out

    def prepare_model_inputs(self, *args: Any, **given: Any) -> Any:
        inputs = super().prepare_model_inputs(*args, **given)
        self.read = inputs["input_ids"]
        return inputs

    def _scored(self, words: list[int]) -> Any:
        """Scores of words by its blocks, its last norm and its output projection. Its diffusion stage has them but
        never makes words: their attention is that before an image."""
        count = len(words)
        ids = torch.tensor([words])
        config = self.config
        table = _PARTS.build_batch_2d_rope(count, config.attention_head_dim, base=config.rope_theta)
        with _forward_context(None, self.vllm_config):
            (hidden, *_) = self.model(
                inputs_embeds=self.model.embed_tokens(ids),
                attention_mask=torch.ones(1, 1, count, count, dtype=torch.bool).tril(),
                position_ids=torch.arange(count)[None],
                custom_pos_emb=table,
                mode="gen_image",
                first_step=True,
                query_lens=[count],
                seq_lens=[count],
                gen_timestep_scatter_index=torch.tensor([[count]]),
                full_attn_spans=[[]],
                use_cache=False,
                return_dict=False,
            )
        logits = self.lm_head(self.model.norm(hidden.view(count, -1)))
        return _OUTPUT(output={"payload": {"image": torch.zeros(3, 8, 8)}}, trajectory_latents={"logits": logits})


def main(model: str, stages: str, requests: str, out: str) -> None:
    """One trajectory of each request, and the scores of the words."""
    sampling_params: Any = importlib.import_module("vllm_omni.inputs.data").OmniDiffusionSamplingParams
    wanted = json.loads(Path(requests).read_text())
    engine: Any = importlib.import_module("vllm_omni.entrypoints.omni").Omni(
        model=model,
        dtype="float32",
        deploy_config=stages,
        trust_remote_code=True,
        custom_pipeline_args={"pipeline_class": "omni_hunyuan_image3.Recorded"},
    )
    found = {}
    for name, request in wanted["images"].items():
        sampling = sampling_params(
            height=request["height"],
            width=request["width"],
            num_inference_steps=wanted["num_steps"],
            seed=wanted["seed"],
            guidance_scale=request["guidance"],
            guidance_scale_provided=True,
            extra_args={"levels": request["levels"]},
        )
        (output,) = engine.generate(request["prompt"], sampling, use_tqdm=False)
        found |= {f"{name}.{part}": tensor.contiguous() for part, tensor in output.trajectory_latents.items()}
    words = sampling_params(height=64, width=64, seed=0, extra_args={"words": wanted["words"]})
    (answer,) = engine.generate({"prompt": ""}, words, use_tqdm=False)
    engine.close()
    save_file(found | {"logits": answer.trajectory_latents["logits"].contiguous()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
