"""Measures what replay of texts does without: padding, the logits of a whole batch, waiting. Prints Markdown.

    uv run python apps/trainer/bench/text_training.py [replay|short|memory|devices]

    replay  forward and backward of the arithmetic model over texts of 8 to 256 tokens, packed and padded
    short   the same over texts of 8 to 11 tokens, with one call of attention per length and one per text
    memory  peak memory of log-probs at a vocabulary of 151,936, in chunks and at once
    devices work of the slowest device over the mean, as samples come and as they are dealt by their tokens
Both ways of a measurement run in turn in one process; CPU seconds of this process are counted, so other work on the
machine hardly matters to the ratios.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from unirl.app.environment import packaged_path
from unirl.models.packing import Packing
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.models.token_scores import CHUNK_LOGITS, chunked_scores, softmax_scores
from unirl.trainer.balance import balanced_order
from unirl.types.conditions import PromptCondition
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

SHORTEST, LONGEST = 8, 256
NUM_TEXTS = 64
PROMPT_TOKENS = 4
VOCABULARY = 151_936
"""Words of Qwen3's vocabulary."""
WIDTH = 128
"""Width of the hidden states; the vocabulary outweighs it by far at any width of a real model."""
MIB = 2**20


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def length_mixes(num_texts: int) -> dict[str, list[int]]:
    """Tokens of every text, prompt included, by the name of the mix."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(num_texts, generator=generator)
    share[:2] = torch.tensor([0.0, 1.0])
    return {
        "uniform": (SHORTEST + share * (LONGEST - SHORTEST)).round().int().tolist(),
        "uniform in the logarithm, many short ones": (SHORTEST * (LONGEST / SHORTEST) ** share).round().int().tolist(),
        "all of 256": [LONGEST] * num_texts,
    }


def replay(repeats: int, micro_batch_size: int = 16) -> None:
    """Packed against padded."""
    pipeline = Qwen3Pipeline(Qwen3Bundle(str(packaged_path("arithmetic", "checkpoint"))))
    stages = {"packed": pipeline, "padded": AutoregressivePipeline(pipeline.adapter, packed=False)}
    params = ARSamplingParams(temperature=1.0, max_new_tokens=LONGEST)
    say(f"{NUM_TEXTS} texts in micro-batches of {micro_batch_size}, median of {repeats}:\n")
    say("| lengths | tokens | padding | packed, CPU s | padded, CPU s | padded / packed |")
    say("|---|---|---|---|---|---|")
    for name, lengths in length_mixes(NUM_TEXTS).items():
        micros = [lengths[start : start + micro_batch_size] for start in range(0, NUM_TEXTS, micro_batch_size)]
        batches = [random_texts(micro, pipeline.bundle.vocabulary_size, params) for micro in micros]

        def run(stage: AutoregressivePipeline, batches: list[tuple[PromptCondition, TextSegment]] = batches) -> None:
            for prompt, segment in batches:
                stage.replay({"prompt": prompt}, segment, params).logp_N.sum().backward()

        pairs = [tuple(cpu_seconds(lambda s=stage: run(s)) for stage in stages.values()) for _ in range(repeats + 1)][
            1:
        ]
        packed, padded = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        padding = 1 - sum(lengths) / sum(len(micro) * max(micro) for micro in micros)
        say(f"| {name} | {sum(lengths)} | {padding:.0%} | {packed:.2f} | {padded:.2f} | {ratio:.2f} |")


def short(repeats: int, num_texts: int = 128) -> None:
    """One call of attention per length against one per text."""
    pipeline = Qwen3Pipeline(Qwen3Bundle(str(packaged_path("arithmetic", "checkpoint"))))
    params = ARSamplingParams(temperature=1.0, max_new_tokens=8)
    lengths = [8 + place % 4 for place in range(num_texts)]
    prompt, segment = random_texts(lengths, pipeline.bundle.vocabulary_size, params)

    def run() -> None:
        pipeline.replay({"prompt": prompt}, segment, params).logp_N.sum().backward()

    def run_each() -> None:
        with mock.patch.object(Packing, "runs", property(lambda self: [(1, length) for length in self.lengths])):
            run()

    pairs = [(cpu_seconds(run), cpu_seconds(run_each)) for _ in range(repeats + 1)][1:]
    per_length, per_text = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    say(
        f"{num_texts} texts of 8 to 11 tokens, one micro-batch, median of {repeats}: {per_length * 1e3:.0f} ms with one"
    )
    say(f"call per length, {per_text * 1e3:.0f} ms with one per text, ratio {ratio:.2f}.")


def random_texts(lengths: list[int], vocabulary: int, params: ARSamplingParams) -> tuple[PromptCondition, TextSegment]:
    """Prompts of a few tokens with completions that fill the lengths up."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    prompt = PromptCondition.pack(tokens=[text[:PROMPT_TOKENS] for text in texts])
    return prompt, TextSegment.pack(tokens=[text[PROMPT_TOKENS:] for text in texts], params=params)


def memory(repeats: int) -> None:
    """Chunks of the vocabulary projection against all of it at once, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()

    def at_once(hidden: Tensor, tokens: Tensor) -> None:
        logp, entropy, _ = softmax_scores(hidden @ weight.T, tokens, 1.0)
        (logp - 0.01 * entropy).sum().backward()

    def in_chunks(hidden: Tensor, tokens: Tensor) -> None:
        logp, entropy, _ = chunked_scores(
            lambda x: x @ weight.T, hidden, tokens, 1.0, tokens_per_chunk=CHUNK_LOGITS // VOCABULARY
        )
        (logp - 0.01 * entropy).sum().backward()

    in_chunks(*random_states(8, generator))  # the gradient of the weight stays
    say(f"Vocabulary {VOCABULARY:,}, float32, chunks of {CHUNK_LOGITS // VOCABULARY} tokens:\n")
    say("| tokens | logits, MiB | chunks: peak MiB | at once: peak MiB | at once / chunks | CPU s, chunks / at once |")
    say("|---|---|---|---|---|---|")
    for num_tokens in (256, 512, 1024, 2048):
        inputs = random_states(num_tokens, generator)
        chunks = peak_mib(lambda inputs=inputs: in_chunks(*inputs))
        row = f"| {num_tokens} | {num_tokens * VOCABULARY * 4 / MIB:.0f} | {chunks:.0f} | "
        if num_tokens > 512:
            say(row + "not run | | |")
            continue
        whole = peak_mib(lambda inputs=inputs: at_once(*inputs))
        ratios = [
            cpu_seconds(lambda inputs=inputs: in_chunks(*inputs)) / cpu_seconds(lambda inputs=inputs: at_once(*inputs))
            for _ in range(repeats)
        ]
        say(row + f"{whole:.0f} | {whole / chunks:.1f} | {statistics.median(ratios):.2f} |")


def devices(repeats: int, per_device: int = 64, micro_batch_size: int = 16) -> None:
    """Tokens of the busiest device over the mean, by micro-batch, which all devices end together. Nothing is timed."""
    say(f"{per_device} texts a device in micro-batches of {micro_batch_size}:\n")
    say("| lengths | devices | as they come | dealt by tokens |")
    say("|---|---|---|---|")
    for name in list(length_mixes(2))[:2]:
        for num_devices in (2, 8, 32):
            lengths = length_mixes(per_device * num_devices)[name]
            orders = list(range(len(lengths))), balanced_order(lengths, num_devices, num_updates=1)
            shown = [f"{busiest([lengths[i] for i in order], num_devices, micro_batch_size):.3f}" for order in orders]
            say(f"| {name} | {num_devices} | {shown[0]} | {shown[1]} |")


def busiest(lengths: list[int], num_devices: int, micro_batch_size: int) -> float:
    """Sum over micro-batches of the most tokens of a device, over what an even split would make it."""
    work = torch.tensor(lengths).view(num_devices, -1, micro_batch_size).sum(-1)
    return float(work.amax(0).sum() / work.float().mean(0).sum())


def random_states(num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hidden states and tokens."""
    hidden = torch.randn(num_tokens, WIDTH, generator=generator).requires_grad_()
    return hidden, torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)


def peak_mib(function: Callable[[], object]) -> float:
    """How far the resident memory of this process rises above where it is, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present
    before = resident("VmRSS")
    function()
    return (resident("VmHWM") - before) / MIB


def resident(field: str) -> int:
    """A field of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def say(line: str) -> None:
    """Print at once, for who watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the parts that are named, all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[int], None]] = {"replay": replay, "short": short, "memory": memory, "devices": devices}
    parser.add_argument("part", nargs="?", choices=list(parts), help="all without one")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in [options.part] if options.part else parts:
        parts[part](options.repeats)
        say("")


if __name__ == "__main__":
    main()
