"""Sample a checkpoint of the codes and judge it: `python -m unirl.worlds.shapes.codes.evaluate --checkpoint DIR`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from torch import Tensor

from unirl.models.janus.bundle import JanusBundle
from unirl.models.janus.pipeline import JanusPipeline
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams
from unirl.worlds.shapes.evaluate import accuracy, named_prompts


def evaluate(
    pipeline: JanusPipeline, prompts: Sequence[str], *, num_samples: int, guidance_scale: float = 1.0, seed: int = 1234
) -> dict[str, float]:
    """`accuracy` of a checkpoint, sampled at temperature 1."""
    params = ARSamplingParams(
        temperature=1.0, max_new_tokens=pipeline.sample_length, guidance_scale=guidance_scale, seed=seed
    )
    number = count()

    def draw(batch: Sequence[str]) -> Tensor:
        conditions = pipeline.encode({"text": Texts(texts=list(batch))}, params)
        with pipeline.evaluating():
            segment = pipeline.generate(conditions, params, noise_keys=[str(next(number)) for _ in batch])
            return pipeline.images(segment).pixels

    return accuracy(draw, prompts, num_samples=num_samples)


def main() -> None:
    """Print the accuracy of a checkpoint on the prompts of RL and on those held out, with guidance and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=512)
    arguments = parser.parse_args()
    pipeline = JanusPipeline(JanusBundle(str(arguments.checkpoint)))
    for name, prompts in named_prompts().items():
        for scale in (1.0, 2.0):
            found = evaluate(pipeline, prompts, num_samples=arguments.samples, guidance_scale=scale)
            print(f"{name}, guidance {scale}: {found}")  # noqa: T201 - the result is the output


if __name__ == "__main__":
    main()
