"""What the training backend needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from unirl.algorithms.rules import needs_reference
from unirl.types.device_kinds import ONE_DEVICE_ALONE, kind_of, lacks
from unirl.types.recipe import Machine, Messages, Part, Run


def topology_problem(
    dp_replicate: int, dp_shard: int, sp: int, tp: int, ep: int, ring: int, num_devices: int
) -> str | None:
    """What is wrong with the sizes of the axes, with the fix, or None. dp_shard: -1 takes what is left."""
    for name, size in (("sp", sp), ("ep", ep)):
        if tp > 1 and size > 1:
            return f"tp = {tp} with {name} = {size}: the two are not proven together. Set one of them to 1."
    if sp % ring:
        fitting = [each for each in range(1, sp + 1) if sp % each == 0]
        return f"ring = {ring} does not divide sp = {sp}, whose ranks it groups. Set it to one of {fitting}."
    if dp_shard < 1 and dp_shard != -1:
        return f"dp_shard = {dp_shard} must be positive, or -1"
    wanted = {"dp_replicate": dp_replicate, "sp": sp, "tp": tp}
    named = [name for name, size in wanted.items() if size > 1]
    fixed = dp_replicate * sp * tp
    if num_devices % fixed:
        shown = f"{' * '.join(named)} = {' * '.join(str(wanted[name]) for name in named)}"
        product = f" = {fixed} does" if len(named) > 1 else " does"
        return (
            f"{shown}{product} not divide {num_devices} devices. Change {' or '.join(named)}, or the number of devices."
        )
    if dp_shard not in (-1, num_devices // fixed):
        beside = {name: wanted[name] for name in named if name != "dp_replicate"}
        sizes = [dp_replicate, dp_shard, *beside.values()]
        names = " * ".join(["dp_replicate", "dp_shard", *beside])
        return (
            f"{names} = {' * '.join(map(str, sizes))} = {fixed * dp_shard}, but there are {num_devices} devices. "
            f"Set dp_shard: {num_devices // fixed}, or -1."
        )
    if (num_devices // dp_replicate) % ep:
        of_what = (
            f"{num_devices} devices" if dp_replicate == 1 else f"{num_devices // dp_replicate} devices of each copy"
        )
        return f"ep = {ep} does not divide the {of_what}. Change ep, or the number of devices."
    return None


def unproven_with_layers(size: int, options: Mapping[str, Mapping[str, object]], at: str = "") -> Iterator[str]:
    """Messages for options of a backend that topology.tp = size is not proven with. options: by section, as given. at:
    beginning of the names."""
    fsdp, optimizer, lora = (options.get(section) or {} for section in ("fsdp", "optimizer", "lora"))
    found = {f"fsdp.{name}": fsdp.get(name) for name in ("compile", "cpu_offload", "activation_offload")}
    found |= {"optimizer.offload": optimizer.get("offload"), "lora.base": lora.get("base")}
    found["optimizer.states"] = None if optimizer.get("states") == "full" else optimizer.get("states")
    for option, value in found.items():
        if value:
            yield f"{at}topology.tp = {size} is not proven with {at}{option} = {value}. Remove one of them."


def no_ring(device: str) -> str:
    """The message for a device whose attention gives no sums."""
    feature = "attention that gives its sums, by which the blocks of topology.ring add up"
    return lacks(device, feature, "Set topology.ring: 1, or another device.")


def layers_kept(at: str, name: str, because: str = "") -> str:
    """The message for a bundle whose layers are not divided."""
    return f"{at}: the layers of {name} cannot be divided among ranks{because and ': '}{because}. Set it to 1."


def device_options_fit(own: Part, run: Run) -> Messages:
    """No option of another device."""
    for name in ("cpu_offload", "activation_offload"):
        if run.device == "cpu" and (own.get("fsdp") or {}).get(name):
            yield f"{own.at}.fsdp.{name} does nothing with device: cpu. Remove it."
    if run.device == "cpu" and (own.get("optimizer") or {}).get("offload"):
        yield f"{own.at}.optimizer.offload does nothing with device: cpu. Remove it."


def sharding_suits_the_device(own: Part, run: Run) -> Messages:
    """FSDP, which one device does without but for cpu_offload, needs collectives of the device."""
    if not kind_of(run.device).has_many and (own.get("fsdp") or {}).get("cpu_offload"):
        yield lacks(run.device, f"collectives, which FSDP needs for {own.at}.fsdp.cpu_offload", ONE_DEVICE_ALONE)


def ring_suits_the_device(own: Part, run: Run) -> Messages:
    """A ring adds up attention by blocks."""
    policy = run.policy_of(own)
    if policy.has_ring and kind_of(run.device).block_attention is None:
        yield no_ring(run.device)


def kept_reference_has_a_use(own: Part, run: Run) -> Messages:
    """A second copy of the weights is kept where something compares with it, and where there is no other reference."""
    if not own.get("keep_reference"):
        return
    algorithms = run.policy_of(own).algorithms.values()
    is_evaluated = run.evaluation is not None and run.evaluation.get("policy") == "reference"
    if own.get("lora") is not None:
        yield (
            f"{own.at}.keep_reference: true keeps a second copy of the weights, but with {own.at}.lora the frozen "
            "weights are the reference. Set keep_reference: false, or lora: null."
        )
    elif not is_evaluated and all(needs_reference(algorithm) is None for algorithm in algorithms):
        at = next(algorithm.at for algorithm in algorithms)
        yield f"{own.at}.keep_reference: true does nothing with {at}.kl_coef = 0. Remove it."


def form_of_the_optimizer_is_for_its_states(own: Part, run: Run) -> Messages:
    """Forms of torch's AdamW are for full states. The class refuses the rest too, once it is made."""
    del run
    optimizer = own.get("optimizer") or {}
    form, states = optimizer.get("implementation", "auto"), optimizer.get("states", "full")
    if states != "full" and form != "auto":
        yield (
            f"{own.at}.optimizer.implementation = {form!r} is a form of torch's AdamW, which keeps full states. Set "
            f"implementation: auto, or states: full instead of {states}."
        )


def moments_are_offloaded_in_one_way(own: Part, run: Run) -> Messages:
    """With the whole optimizer on the host nothing is left to move. The class refuses both too, once it is made."""
    del run
    if (own.get("optimizer") or {}).get("offload") and (own.get("fsdp") or {}).get("cpu_offload"):
        yield (
            f"{own.at}.optimizer.offload does nothing with {own.at}.fsdp.cpu_offload, which keeps weights, gradients "
            "and moments in host memory. Remove one of the two."
        )


def offloaded_blocks_are_not_compiled(own: Part, run: Run) -> Messages:
    """Nothing is moved of compiled blocks. The class refuses both too, once it is made."""
    del run
    fsdp = own.get("fsdp") or {}
    if fsdp.get("activation_offload") and fsdp.get("compile"):
        yield (
            f"{own.at}.fsdp.activation_offload moves nothing of compiled blocks. Set it or {own.at}.fsdp.compile to "
            "false."
        )


def quantised_base_is_sampled_where_it_trains(own: Part, run: Run) -> Messages:
    """Weights in 4 bits are those of the model that trains: an engine with a copy has others, and other log-probs."""
    if not (own.get("lora") or {}).get("base"):
        return
    policy = run.policy_of(own)
    for stage in run.stages:
        if stage.policy == policy.name and stage.engine.abilities.get("has_own_weights"):
            yield (
                f"{own.at}.lora.base: {own.get('lora')['base']} quantises the model that trains, and "
                f"{stage.engine.at} ({stage.engine.name}) samples with a copy that is not. Set {own.at}.lora.base: "
                "null, or sample with unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine."
            )


def lora_targets_exist(own: Part, run: Run, machine: Machine) -> Messages:
    """Every layer that the recipe names for LoRA is in a checkpoint of this machine, by the names of its weights."""
    targets, bundle = (own.get("lora") or {}).get("target_modules"), run.policy_of(own).bundle
    layers = {name.removesuffix(".weight") for name in _trainable_weights(bundle)}
    if not targets or isinstance(targets, str) or not layers:
        return
    unmatched = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if unmatched:
        ends = sorted({name.rsplit(".", 1)[-1] for name in layers if not name.endswith(".bias")})
        yield (
            f"{own.at}.lora.target_modules {unmatched} match no layer of {bundle.node['pretrained_model']}, whose "
            f"layers end in {', '.join(ends[:12])}. Correct them, or set target_modules: null for the family's own."
        )


def _trainable_weights(bundle: Part) -> Iterator[str]:
    """Names of the weights of what can train in a local pipeline folder, from the heads of their files."""
    folder = Path(str(bundle.node.get("pretrained_model"))).expanduser()
    if not str(bundle.ability("index_file")).endswith("model_index.json"):
        return  # other libraries rename weights as they load them
    for component in ("transformer", "transformer_2", "unet"):
        for file in sorted((folder / component).glob("*.safetensors")):
            try:
                with file.open("rb") as opened:
                    (length,) = struct.unpack("<Q", opened.read(8))
                    yield from json.loads(opened.read(length)).keys() - {"__metadata__"}
            except (OSError, ValueError, struct.error):
                return  # loading it says what is wrong


RULES = (
    device_options_fit,
    sharding_suits_the_device,
    ring_suits_the_device,
    kept_reference_has_a_use,
    form_of_the_optimizer_is_for_its_states,
    moments_are_offloaded_in_one_way,
    offloaded_blocks_are_not_compiled,
    quantised_base_is_sampled_where_it_trains,
)
MACHINE_RULES = (lora_targets_exist,)
