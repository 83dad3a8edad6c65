"""vLLM-Omni's own BAGEL, in its own interpreter: `python omni_bagel.py FOLDER REQUESTS OUT`.

REQUESTS: JSON of {"images": name -> extra arguments, "prompt", "height", "width", "seed", "num_levels", "num_words"}.
OUT: safetensors with the latents of every request, and in its metadata the greedy answer to the prompt.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(model: str, requests: str, out: str) -> None:
    """One trajectory of each request, and a text."""
    safetensors: Any = importlib.import_module("safetensors.torch")
    package: Any = importlib.import_module("vllm_omni")
    sampling_params: Any = importlib.import_module("vllm_omni.inputs.data").OmniDiffusionSamplingParams
    wanted = json.loads(Path(requests).read_text())
    stages = Path(package.__file__).parent / "deploy" / "bagel_single_stage.yaml"
    engine: Any = importlib.import_module("vllm_omni.entrypoints.omni").Omni(
        model=model, dtype="float32", deploy_config=str(stages)
    )
    found = {}
    for name, extra in wanted["images"].items():
        sampling = sampling_params(
            height=wanted["height"],
            width=wanted["width"],
            num_inference_steps=wanted["num_levels"],
            seed=wanted["seed"],
            return_trajectory_latents=True,
            extra_args=extra,
        )
        request = {"prompt": wanted["prompt"], "modalities": ["image"]}
        (output,) = engine.generate(request, sampling, use_tqdm=False)
        found[name] = output.trajectory_latents.contiguous()
    words = sampling_params(seed=wanted["seed"], extra_args={"max_think_tokens": wanted["num_words"]})
    (answer,) = engine.generate({"prompt": wanted["prompt"], "modalities": ["text"]}, words, use_tqdm=False)
    engine.close()
    safetensors.save_file(found, out, metadata={"text": json.dumps(answer.multimodal_output)})


if __name__ == "__main__":
    main(*sys.argv[1:])
