"""Rules of SGLang servers about the recipe and this machine. See `unirl.types.recipe`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unirl.rollout.engine.served_text.rules import has_linear_attention, weights_have_the_names_of_the_folder
from unirl.rollout.engine.tensor_parallel import heads_divide
from unirl.types.recipe import Machine, Messages, Part, Run

_PATCH = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 14}
"""Default patch sizes in a Qwen2.5-VL configuration; patch_size is the length of a side."""
_PATCH_NUMBERS = 3 * 2 * 14 * 14
"""Numbers per patch in the only layout that SGLang 0.5.23 encodes
(Qwen2_5_VLForConditionalGeneration.get_image_feature)."""


STARTS: Mapping[str, object] = {
    "port": None,
    "kv_cache_tokens": None,
    "num_devices": 1,
    "gpus": None,
    "engine_args": None,
}
"""Keywords that configure how a server is started, with their defaults."""
_HERE = ("127.0.0.1", "localhost", "::1")
_SHARED_MEMORY = "/dev/shm"


def adapters_need_a_gpu(at: str, rank: object) -> str:
    """Message: the engine at `at` takes no adapters on a CPU."""
    return (
        f"{at}.max_lora_rank = {rank}, but SGLang's adapters need a GPU. Push whole weights, in which adapters are "
        f"merged: {at}.max_lora_rank: null, sync._target_: unirl.distributed.weight_sync.full.FullWeightSync."
    )


def adapters_are_served(own: Part, run: Run) -> Messages:
    """A server started on a CPU takes whole weights only."""
    rank = own.get("max_lora_rank")
    if run.device == "cpu" and own.get("url") is None and rank is not None:
        yield adapters_need_a_gpu(own.at, rank)


def running_server(at: str, url: str, given: Mapping[str, Any]) -> Iterator[str]:  # Any: a recipe's values
    """Messages for keywords in `given` that do not apply to a running server, for the engine at `at`."""
    num, folder = given["num_instances"], given["transfer_dir"]
    if num > 1:
        yield f"{at}.num_instances = {num}, but {at}.url names one server that runs already. Set one of them alone."
    idle = [
        f"{at}.{name} = {given[name]}" for name, default in STARTS.items() if given[name] and given[name] != default
    ]
    if idle:
        yield (
            f"{', '.join(idle)}: does nothing for the server that runs already, at {url}. Start that server with it, "
            f"and remove it here; or remove {at}.url."
        )
    host = urlsplit(url).hostname
    if host is None:
        yield f"{at}.url = {url} names no host. Give one as http://HOST:PORT."
    elif host not in _HERE and is_memory(folder):
        yield f"{at}.url = {url} is another host, {unshared(at, folder)} For a server on this host write 127.0.0.1."


def unshared(at: str, folder: str) -> str:
    """Message: the hosts of a server cannot read pushes to the engine at `at`."""
    return (
        f"and {at}.transfer_dir = {folder} is memory of this host, where it reads no push. Set {at}.transfer_dir to a "
        "folder that this host and all hosts of the server mount at the same path."
    )


def is_memory(folder: str) -> bool:
    """True if a folder is in host memory, which other hosts cannot read."""
    return Path(folder).resolve().is_relative_to(_SHARED_MEMORY)


def a_running_server_is_taken_as_it_is(own: Part, run: Run) -> Messages:
    """A running server cannot be given start options."""
    url = own.get("url")
    if url is not None:
        yield from running_server(
            own.at, url, {name: own.get(name) for name in (*STARTS, "num_instances", "transfer_dir")}
        )


def model_is_served(own: Part, run: Run) -> Messages:
    """SGLang is given no sounds, and loads a whole Qwen3-Omni under other names than a push of its Thinker has."""
    bundle = run.policy.bundle
    if "Qwen3OmniThinkerBundle" in bundle.class_names:
        yield (
            f"{own.name} does not serve {bundle.name}: it is given no sounds, and its Qwen3-Omni has other names than "
            "the Thinker that is pushed. Sample with vLLM (parts/engine=text_vllm), the model that trains "
            "(text_trainside) or a copy of it (text_replica)."
        )


def pictures_are_seen(own: Part, run: Run, machine: Machine) -> Messages:
    """SGLang encodes images as the model in this machine's folder does."""
    path = Path(str(own.node.get("model"))) / "config.json"
    if path.is_file():
        yield from unseen_pictures(own.at, json.loads(path.read_text(encoding="utf-8")))


def unseen_pictures(at: str, config: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON
    """Messages if SGLang cannot encode images with a model of this configuration, for the engine at `at`."""
    if config.get("model_type") != "qwen2_5_vl":
        return
    vision = config.get("vision_config", {})
    sizes = [vision.get(name, default) for name, default in _PATCH.items()]
    numbers = math.prod((*sizes, sizes[-1]))
    if numbers != _PATCH_NUMBERS:
        product = " * ".join(map(str, (*sizes, sizes[-1])))
        yield (
            f"{at}.model has patches of {product} = {numbers} numbers. SGLang sees images by Qwen2.5-VL alone with "
            f"{_PATCH_NUMBERS}, and would take others for embeddings. Sample with vLLM: {at}._target_: "
            "unirl.rollout.engine.vllm_llm.engine.VLLMRolloutEngine."
        )


def linear_attention_has_kernels(own: Part, run: Run) -> Messages:
    """SGLang 0.5.23 computes linear attention by kernels of Triton, which has no CPU backend."""
    if run.device == "cpu" and own.get("url") is None and has_linear_attention(run):
        yield (
            f"{own.name} does not serve {run.policy.bundle.name} on a CPU: SGLang 0.5.23 computes linear attention by "
            "Triton, which needs a GPU. Sample with the model that trains (parts/engine=text_trainside_cpu) or with "
            "vLLM in bf16 (parts/engine=text_vllm_cpu)."
        )


RULES = (adapters_are_served, a_running_server_is_taken_as_it_is, linear_attention_has_kernels, model_is_served)
MACHINE_RULES = (heads_divide, pictures_are_seen, weights_have_the_names_of_the_folder)
