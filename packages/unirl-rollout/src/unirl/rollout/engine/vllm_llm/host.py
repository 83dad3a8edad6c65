"""Runs vLLM and answers this package's messages. Imported only by the interpreter that has vLLM."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch

from unirl.rollout.engine.checkpoint import checkpoint_shapes
from unirl.rollout.engine.child.adapter import SentAdapter
from unirl.rollout.engine.child.messages import Message, Start
from unirl.rollout.engine.child.server import Steps
from unirl.rollout.engine.child.weights_host import WeightsHost
from unirl.rollout.engine.push import CompletePush, PushReceiver, refuse
from unirl.rollout.engine.served_images import picture
from unirl.rollout.engine.served_sounds import waveform
from unirl.rollout.engine.served_text.call import Generate, Generations
from unirl.rollout.engine.vllm_llm.kept_samples import KeptSamples, Row, Sample
from unirl.rollout.engine.vllm_llm.messages import Ready
from unirl.rollout.engine.written_for import VLLM
from unirl.types.errors import ContractError, WeightSyncError
from unirl.types.weights import WeightBucket

logger = logging.getLogger(__name__)

EXTENSION = "unirl.rollout.engine.vllm_llm.worker_ext.WeightSyncExtension"
_ADAPTER_ID = 1
_ADAPTER_NAME = "policy"


class EngineHost(WeightsHost):
    """Owns vLLM's engine and tracks its policy version. Raises ConfigError if vLLM is missing."""

    def __init__(self, start: Start, aborts: Container[int]) -> None:
        self._vllm: Any = VLLM.require()  # Any: an optional module
        folder = _model_folder(start.model)
        self._shapes = checkpoint_shapes(folder)
        config = _read(folder / "config.json")
        media: dict[str, Any] = config.get("thinker_config", config)  # Any: JSON
        self._image_token, self._audio_token = media.get("image_token_id"), media.get("audio_token_id")
        self._hop = _read(folder / "preprocessor_config.json").get("hop_length", 1) if self._audio_token else 1
        """Samples of a sound per frame."""
        self._aborts = aborts
        self._calls: list[int] = []
        """Numbers of the running calls, oldest first."""
        self._samples: dict[str, Sample] = {}
        """State of each row of the running calls, and of what is kept, by request name."""
        self._kept = KeptSamples()
        self._is_paused = False
        """True if vLLM computes nothing, which it does between calls while it holds samples."""
        self._num_loads = 0
        """Times that weights were loaded."""
        self._paths: list[str] = []
        self._adapter: Any = None  # Any: a vllm LoRARequest, once one was pushed
        options = dict(start.engine_args)
        uses_processes = options.pop("enable_multiprocessing")
        self._keeps_cache = bool(options.pop("keeps_cache", False))
        arguments = self._vllm.EngineArgs(
            model=str(folder),
            worker_extension_cls=EXTENSION,
            # Log-probs under the sampling distribution: temperature, top-p and top-k applied.
            logprobs_mode="processed_logprobs",
            # Tokens are returned every 8 steps, so that an abort keeps what was sampled. What is kept is returned at
            # once: later, it would not be known which weights drew it.
            stream_interval=1 if self._keeps_cache else 8,
            # Only tokens are exchanged, but vLLM builds its image processor with the tokenizer.
            skip_tokenizer_init=self._image_token is None,
            **options,
        )
        self._engine = self._vllm.LLMEngine.from_engine_args(arguments, enable_multiprocessing=uses_processes)
        self._pushes = PushReceiver(self._shapes, str(self._engine.model_config.dtype), start.policy_version)

    def ready(self) -> Ready:
        """Facts about the engine for the trainer."""
        config = self._engine.model_config
        return Ready(
            version=self._vllm.__version__,
            torch_version=torch.__version__,
            vocab_size=config.get_vocab_size(),
            context_length=config.max_model_len,
            dtype=str(config.dtype),
            max_running=self._engine.vllm_config.scheduler_config.max_num_seqs,
            num_tensors=len(self._shapes),
            image_token=self._image_token,
            audio_token=self._audio_token,
        )

    def answer(self, message: Message) -> Message | Steps:
        """Answer a message."""
        if isinstance(message, Generate):
            return self.generate(message)
        if self._calls:
            raise ContractError(f"{type(message).__name__} came while {len(self._calls)} calls generate")
        return self.answer_weights(message)

    # Generation -------------------------------------------------------------------------------------------------

    def generate(self, call: Generate) -> Steps:
        """Sample all prompts of a call, batched with those of other calls; stops early if aborted.

        A vLLM step advances all calls, so only the oldest call runs it.
        """
        self._pushes.require_usable()
        version = self._pushes.policy_version
        self._resume()
        rows = [
            self._kept.take(call, row) or Row(f"{call.number}-{row}", Sample(prompt))
            for row, prompt in enumerate(call.prompts)
        ]
        prompts = prompts_of(call, self._hop)
        self._calls.append(call.number)
        keeps = False
        try:
            for row, own in enumerate(rows):
                self._samples[own.request] = own.sample
                if not own.is_begun:
                    self._begin(own, prompts[row], self._sampling(call, call.seeds[row], call.budget(row)))
            while any(own.sample.reason is None for own in rows) and call.number not in self._aborts:
                if self._calls[0] == call.number:
                    self._step()
                yield
            keeps = self._keeps_cache and bool(call.names) and not (call.pictures or call.sounds)
        finally:
            self._calls.remove(call.number)
            self._end(call, rows, keeps=keeps)
        samples = [own.sample for own in rows]
        return Generations(
            version,
            [own.sample.tokens[own.num_told :] for own in rows],
            [own.sample.log_probs[own.num_told :] for own in rows],
            [sample.reason or "abort" for sample in samples],
            [sample.refusal for sample in samples] if any(sample.refusal for sample in samples) else [],
            [own.sample.versions[own.num_told :] for own in rows] if any(own.is_begun for own in rows) else [],
            [row for row, own in enumerate(rows) if own.is_in_place],
        )

    def _begin(self, own: Row, prompt: dict[str, Any], sampling: Any) -> None:  # Any: of vLLM
        if self._keeps_cache:  # blocks of weights before cannot be dropped while others of theirs are in use
            prompt = {**prompt, "cache_salt": str(self._num_loads)}
        try:
            self._engine.add_request(own.request, prompt, sampling, lora_request=self._adapter)
        except (ValueError, RuntimeError) as error:  # vLLM's checks of one request; nothing is computed yet
            own.sample.reason, own.sample.refusal = "refused", str(error) or type(error).__name__

    def _end(self, call: Generate, rows: Sequence[Row], *, keeps: bool) -> None:
        """Take the rows of a call that is over from vLLM, but for those that are kept."""
        if keeps and not self._calls:
            self._pause()
        held = {row for row, own in enumerate(rows) if keeps and own.sample.reason is None and own.sample.tokens}
        self._drop([own.request for row, own in enumerate(rows) if row not in held])
        replaced = [self._kept.keep(call, row, rows[row]) for row in sorted(held)]
        self._drop([request for request in replaced if request is not None])

    def _drop(self, requests: list[str]) -> None:
        self._engine.abort_request(requests)  # does nothing of those that have finished
        for request in requests:
            self._samples.pop(request, None)

    def _pause(self) -> None:
        """Compute nothing until a call comes, and take the tokens that vLLM has computed."""
        self._engine.sleep(level=0, mode="keep")
        self._is_paused = True
        # vLLM has no public API to tell what is on its way.
        core = self._engine.engine_core
        inner = getattr(core, "engine_core", None)  # in this process
        while inner.batch_queue if inner is not None else not core.outputs_queue.empty():
            self._step()

    def _resume(self) -> None:
        if self._is_paused:
            self._engine.wake_up(tags=["scheduling"])
            self._is_paused = False

    def _step(self) -> None:
        """Run vLLM until it returns a few tokens of its samples."""
        for output in self._engine.step():
            sample = self._samples[output.request_id]
            if not sample.tokens:
                _check_read(output.request_id, output.prompt_token_ids, sample.prompt)
            (completion,) = output.outputs
            sample.tokens += completion.token_ids
            sample.log_probs += [
                entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            sample.versions += [self._pushes.policy_version] * len(completion.token_ids)
            sample.reason = completion.finish_reason
            sample.num_preempted = 0 if output.metrics is None else output.metrics.num_preemptions

    def _sampling(self, call: Generate, seed: int, max_tokens: int) -> Any:  # Any: vllm.SamplingParams
        return self._vllm.SamplingParams(
            temperature=call.temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=call.stop_token_ids,
            ignore_eos=True,  # the request lists every token that ends a sample
            logprobs=0,  # only of the drawn token
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    # Weights ----------------------------------------------------------------------------------------------------

    def _begin_push(self) -> None:
        self._paths = []

    def _keep(self, path: str, bucket: WeightBucket) -> None:
        del bucket
        self._paths.append(path)

    def _load_kept(self, push: CompletePush) -> int:
        del push
        results = self._engine.collective_rpc("unirl_reload", args=(self._paths,))
        unbound = sorted({name for _, names in results for name in names})
        refuse("parameters of vLLM's model took no value", unbound)
        self._forget_cached()
        return sum(num for num, _ in results)

    @property
    def _takes_adapters(self) -> bool:
        return self._engine.vllm_config.lora_config is not None

    def _act_with(self, adapter: SentAdapter) -> int:
        folder, num_tensors = str(adapter.folder), len(adapter.tensors)
        request = self._vllm.lora.request.LoRARequest
        if self._adapter is None:  # requests of before would go on without one
            self._drop(self._kept.clear())
        self._engine.add_lora(request(_ADAPTER_NAME, _ADAPTER_ID, folder, load_inplace=True))
        results = self._engine.collective_rpc("unirl_adapter", args=(_ADAPTER_ID,))
        for num_acting, idle in results:
            if idle or 2 * num_acting != num_tensors:
                idle = idle or [f"{2 * num_acting} of {num_tensors} tensors act"]
                refuse("layers of the adapter act on nothing in vLLM's model", idle)
        self._adapter = request(_ADAPTER_NAME, _ADAPTER_ID, folder)
        self._forget_cached()
        return results[0][0]

    def _forget_cached(self) -> None:
        """Drop keys and values of the old weights, or see that only kept samples use them. Raises WeightSyncError if
        vLLM keeps them otherwise."""
        self._num_loads += 1
        self._drop(self._kept.pushed())
        if not len(self._kept) and not self._engine.reset_prefix_cache():
            raise WeightSyncError("vLLM did not reset its prefix cache, which holds keys and values of the old policy")
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()

    # Memory -----------------------------------------------------------------------------------------------------

    def _sleep(self, level: int) -> None:
        """After level 2 the weights must be pushed before the engine generates again."""
        self._drop(self._kept.clear())
        self._resume()
        self._engine.sleep(level=level)
        if level == 2:
            self._pushes.invalidate("its weights were dropped by sleep level 2")

    def _wake_up(self) -> None:
        self._engine.wake_up()


def prompts_of(call: Generate, hop: int = 1) -> list[dict[str, Any]]:  # Any: tokens and media
    """The prompts in vLLM's form; vLLM repeats the single placeholder of an image once per patch, and that of a sound.

    hop: samples per frame of a sound, of which only whole frames are heard: vLLM would fill up the last one.
    """
    pictures = [picture(uri) for uri in call.pictures]
    sounds = [(sound[: len(sound) // hop * hop].numpy(), call.sound_rate) for sound in map(waveform, call.sounds)]
    none: list[list[int]] = [[] for _ in call.prompts]
    return [
        {"prompt_token_ids": prompt, **({"multi_modal_data": media} if media else {})}
        for prompt, shown, heard in zip(call.short_prompts(), call.shown or none, call.heard or none, strict=True)
        for media in [_media(image=[pictures[place] for place in shown], audio=[sounds[place] for place in heard])]
    ]


def _media(**by_kind: list[Any]) -> dict[str, list[Any]]:  # Any: vLLM's items
    return {kind: items for kind, items in by_kind.items() if items}


def _read(path: Path) -> dict[str, Any]:  # Any: JSON
    """A JSON file's values."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _check_read(name: str, found: Sequence[int], prompt: Sequence[int]) -> None:
    if list(found) != list(prompt):
        raise ContractError(
            f"prompt {name.rpartition('-')[2]} has {len(prompt)} tokens, vLLM read {len(found)} or others: its image "
            "processor resizes otherwise. Leave bundle.min_pixels and max_pixels to the checkpoint, or give vLLM the "
            "same (engine.engine_args.mm_processor_kwargs)."
        )


def _model_folder(model: str) -> Path:
    """Local folder of a model; a hub id is downloaded."""
    if Path(model).is_dir():
        return Path(model).absolute()
    hub: Any = importlib.import_module("huggingface_hub")  # Any: vLLM's own dependency, not ours
    return Path(hub.snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.jinja"]))
