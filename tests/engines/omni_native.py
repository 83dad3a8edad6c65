"""vLLM-Omni alone, in its own interpreter: `python omni_native.py PIPELINE_FOLDER` prints what three requests gave."""

import importlib
import json
import sys
from typing import Any


def main(model: str) -> None:
    """Two images of one seed, one of another, by vLLM-Omni's own pipeline."""
    numpy: Any = importlib.import_module("numpy")
    omni: Any = importlib.import_module("vllm_omni")
    sampling_params: Any = importlib.import_module("vllm_omni.inputs.data").OmniDiffusionSamplingParams
    engine: Any = importlib.import_module("vllm_omni.entrypoints.omni").Omni(model=model, dtype="float32")
    images = []
    for seed in (1, 1, 2):
        sampling = sampling_params(height=64, width=64, num_inference_steps=4, seed=seed)
        (output,) = engine.generate("a cat", sampling, use_tqdm=False)
        images.append(numpy.asarray(output.images[0], dtype=int))
    engine.close()
    first, again, other = images
    print(
        json.dumps(
            {
                "version": omni.__version__,
                "shape": first.shape,
                "repeated": bool((first == again).all()),
                "seeded": bool((first != other).any()),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
