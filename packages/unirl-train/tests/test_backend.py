"""The backend in one process: steps, policies, adapters, precision, offload, export."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from train_fakes import TinyBundle, lora_config, make_backend, rows, run_backward, snapshot, train_step, whole

from unirl.train.backend import policies
from unirl.train.backend.state import COUNTERS
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, LrSchedulerConfig, TrainTopology
from unirl.train.export import Exporter
from unirl.train.lora import adapters_disabled, inject_lora
from unirl.train.precision import keep_in
from unirl.types.errors import CheckpointError, ConfigError, ContractError, TrainingError
from unirl.types.protocols.training import TrainBackend
from unirl.types.roles import remote_method

MODES: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora": lora_config()}}


def outputs(bundle: TinyBundle) -> torch.Tensor:
    with torch.no_grad():
        return bundle.model(rows(0)[0])


def trained(mode: str, **options: Any):
    bundle = TinyBundle()
    backend = make_backend(bundle, **MODES[mode], **options)
    backend.keep_policy("old")
    for step in range(3):
        train_step(backend, bundle.model, step)
    return backend, bundle


# Optimizer steps --------------------------------------------------------------------------------------------------


def test_a_backend_implements_the_protocol_and_has_markers():
    store: TrainBackend = make_backend()  # the type checker compares every member
    for name in ("keep_policy", "update_policy", "offload", "onload", "zero_grad"):
        assert remote_method(type(store), name).dispatch.value == "broadcast"
    for name in ("export_lora", "export_merged"):
        assert remote_method(Exporter, name).dispatch.value == "broadcast"


def test_micro_batches_accumulate_to_the_gradient_of_the_whole_batch():
    gradients = []
    for num_micros in (1, 4):
        bundle = TinyBundle()
        backend = make_backend(bundle)
        run_backward(backend, bundle.model, 0, num_micros=num_micros)
        gradients.append({name: parameter.grad for name, parameter in backend.parameters.items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


def test_a_step_follows_the_schedule_and_clips():
    bundle = TinyBundle()
    backend = make_backend(bundle, scheduler=LrSchedulerConfig("linear", warmup_steps=2, total_steps=4))
    stats = [train_step(backend, bundle.model, step) for step in range(4)]
    assert [s.lr for s in stats] == pytest.approx([0.005, 0.01, 0.01, 0.005])
    run_backward(backend, bundle.model, 0)
    norm = backend.optimizer_step(1e-3).grad_norm
    clipped = torch.stack([p.grad.norm() for p in backend.parameters.values() if p.grad is not None]).norm()
    assert norm > 1e-3
    assert float(clipped) == pytest.approx(1e-3, rel=1e-5)


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ContractError, match="call backward"):
        make_backend().optimizer_step(1.0)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_gradient_that_is_not_finite_changes_nothing_is_counted_and_stops_in_a_row(mode: str):
    backend, bundle = trained(mode, ema=EMAConfig(), max_skipped_steps=3)

    def poisoned() -> Any:
        run_backward(backend, bundle.model, 0)
        next(iter(backend.parameters.values())).grad[0] = float("nan")
        return backend.optimizer_step(1.0)

    before = snapshot(backend)
    assert poisoned().is_skipped and poisoned().is_skipped
    after = snapshot(backend)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["counters"]
    assert all(parameter.grad is None for parameter in backend.parameters.values())
    assert (backend.progress.num_optimizer_steps, backend.progress.num_skipped_steps) == (3, 2)
    assert not train_step(backend, bundle.model, 1).is_skipped  # the row is broken
    poisoned()
    poisoned()
    with pytest.raises(TrainingError, match="3 optimizer steps in a row"):
        poisoned()
    assert backend.progress.num_skipped_steps == 5


# Policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(MODES))
def test_a_policy_computes_as_it_did_when_kept_and_the_trained_one_comes_back_bit_for_bit(mode: str):
    bundle = TinyBundle()
    backend = make_backend(bundle, **MODES[mode])
    start = outputs(bundle)
    backend.keep_policy("old")
    for step in range(3):
        train_step(backend, bundle.model, step)
    before, now = snapshot(backend), outputs(bundle)
    flags = {name: p.requires_grad for name, p in bundle.model.named_parameters()}
    ids = {name: id(p) for name, p in bundle.model.named_parameters()}
    with backend.using_policy("old"):
        assert torch.equal(outputs(bundle), start)
        assert {name: p.requires_grad for name, p in bundle.model.named_parameters()} == flags
    assert torch.equal(outputs(bundle), now) and not torch.equal(now, start)
    assert {name: p.requires_grad for name, p in bundle.model.named_parameters()} == flags
    assert {name: id(p) for name, p in bundle.model.named_parameters()} == ids
    after = snapshot(backend)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_trained_values_come_back_after_an_exception():
    backend, bundle = trained("full")
    now = outputs(bundle)
    with pytest.raises(KeyError), backend.using_policy("old"):
        raise KeyError("inside")
    assert torch.equal(outputs(bundle), now)


def test_a_policy_moves_towards_the_trained_one_by_its_decay():
    backend, _ = trained("full")
    old = {name: tensor.clone() for name, tensor in backend.policies.values("old").items()}
    backend.update_policy("old", 0.75)
    for name, tensor in backend.policies.values("old").items():
        current = backend.parameters[name].detach()
        torch.testing.assert_close(tensor, 0.75 * old[name] + 0.25 * current, rtol=1e-6, atol=1e-7)
    backend.update_policy("old", 0.0)
    assert all(torch.equal(t, backend.parameters[name]) for name, t in backend.policies.values("old").items())


def test_nesting_policies_or_training_inside_one_is_refused():
    backend, bundle = trained("full")
    run_backward(backend, bundle.model, 0)
    with backend.using_policy("old"):
        for action in (
            lambda: backend.using_policy("old").__enter__(),
            lambda: backend.keep_policy("new"),
            lambda: backend.update_policy("old", 0.5),
            lambda: backend.optimizer_step(1.0),
            lambda: backend.state_dict(),
            lambda: Exporter(backend, bundle).export_merged("nowhere"),
        ):
            with pytest.raises(ContractError, match="inside the policy 'old'"):
                action()


def test_unknown_and_reserved_names_are_refused():
    backend = make_backend()
    with pytest.raises(ContractError, match="no policy 'old'; kept: none"), backend.using_policy("old"):
        pass
    for name in ("default", "ema", "reference", "a/b", ""):
        with pytest.raises(ContractError, match="reserved"):
            backend.keep_policy(name)


@pytest.mark.parametrize("mode", list(MODES))
def test_backward_through_a_graph_from_before_a_swap_is_noticed(mode: str):
    backend, bundle = trained(mode)
    loss = bundle.model(rows(0)[0]).square().mean()
    with backend.using_policy("old"):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_reference_of_lora_is_the_base_bit_for_bit_and_touches_no_flag():
    bundle = TinyBundle()
    base = outputs(bundle)
    backend = make_backend(bundle, lora=lora_config())
    assert torch.equal(outputs(bundle), base)  # B starts at zero
    for step in range(3):
        train_step(backend, bundle.model, step)
    flags = {name: p.requires_grad for name, p in bundle.model.named_parameters()}
    assert sum(flags.values()) == len(backend.parameters) == 8
    assert not torch.equal(outputs(bundle), base)
    with backend.reference_policy():
        assert torch.equal(outputs(bundle), base)
        assert {name: p.requires_grad for name, p in bundle.model.named_parameters()} == flags
    assert not torch.equal(outputs(bundle), base)
    assert {name: p.requires_grad for name, p in bundle.model.named_parameters()} == flags


def test_the_reference_of_full_fine_tuning_must_be_asked_for():
    bundle = TinyBundle()
    start = outputs(bundle)
    backend = make_backend(bundle, keep_reference=True)
    train_step(backend, bundle.model, 0)
    with backend.reference_policy():
        assert torch.equal(outputs(bundle), start)
    with pytest.raises(ConfigError, match="keep_reference"), make_backend().reference_policy():
        pass
    with pytest.raises(ConfigError, match="base is the reference"):
        make_backend(lora=lora_config(), keep_reference=True)


@pytest.mark.parametrize("options", [{"lora": lora_config()}, {"keep_reference": True}])
def test_the_reference_runs_under_its_name_as_any_other_policy(options):
    bundle = TinyBundle()
    start = outputs(bundle)
    backend = make_backend(bundle, **options)
    train_step(backend, bundle.model, 0)
    trained = outputs(bundle)
    with backend.using_policy("reference"):
        assert torch.equal(outputs(bundle), start)
    assert torch.equal(outputs(bundle), trained) and not torch.equal(trained, start)
    if "keep_reference" in options:
        assert {name: tensor.shape for name, tensor in backend.policies.values("reference").items()} == {
            name: parameter.shape for name, parameter in backend.parameters.items()
        }


def test_the_moving_average_runs_as_a_policy():
    bundle = TinyBundle()
    backend = make_backend(bundle, ema=EMAConfig(decay=0.5, warmup=False))
    start = {name: p.detach().clone() for name, p in backend.parameters.items()}
    train_step(backend, bundle.model, 0)
    with backend.using_policy("ema"):
        for name, parameter in backend.parameters.items():
            assert not torch.equal(parameter, start[name])
    for name, tensor in backend.policies.values("ema").items():
        torch.testing.assert_close(tensor, (start[name] + backend.parameters[name].detach()) / 2)
    with pytest.raises(ConfigError, match="backend.ema"), make_backend().using_policy("ema"):
        pass


def test_an_earlier_count_of_averages_does_not_change_the_next_one():
    states = []
    for counted in (1, 7):
        bundle = TinyBundle()
        backend = make_backend(bundle, ema=EMAConfig(decay=0.9, every=2))
        for step in range(2):
            train_step(backend, bundle.model, step)
        state = {name: tensor.clone() for name, tensor in backend.state_dict().items()}
        state["counters"][COUNTERS.index("num_ema_averages")] = counted
        backend.load_state_dict(state)
        for step in range(2, 4):
            train_step(backend, bundle.model, step)
        assert backend.counters["num_ema_averages"] == counted + 1
        states.append(backend.policies.values("ema"))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# Precision and wrapping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_float32_masters_add_up_small_updates_that_bf16_masters_lose(mode: str, master: str):
    bundle = TinyBundle()
    backend = make_backend(bundle, lr=1e-5, fsdp=FSDPConfig(param_dtype="bf16", master_dtype=master), **MODES[mode])
    try:
        assert outputs(bundle).dtype == torch.bfloat16
        start = {name: whole(p) for name, p in backend.parameters.items()}
        for _ in range(20):
            train_step(backend, bundle.model, 0)
        changes = []
        for name, parameter in backend.parameters.items():
            # AdamW moves by about 1e-5 a step; half a unit in the last place of a bf16 weight above 1/16 is 2.4e-4.
            changes.append((whole(parameter) - start[name])[start[name].abs() > 1 / 16].abs())
        largest = float(torch.cat(changes).max())
        assert largest == 0.0 if master == "bf16" else 1e-4 < largest < 2.5e-4
    finally:
        backend.close()


@pytest.mark.parametrize("shape", [(8,), (8, 6)])
def test_inputs_are_cast_but_timesteps_of_rows_or_tokens_keep_float32(shape: tuple[int, ...]):
    bundle = TinyBundle()
    backend = make_backend(bundle, fsdp=FSDPConfig(param_dtype="bf16"))
    try:
        with torch.no_grad():
            bundle.model(rows(0)[0], timestep_B=torch.full(shape, 963.7))
        assert bundle.model.seen_timestep_dtype == torch.float32
    finally:
        backend.close()


def test_swapped_values_reach_the_gathered_weights_of_a_sharded_model():
    bundle = TinyBundle()
    backend = make_backend(bundle, fsdp=FSDPConfig(param_dtype="bf16"))
    try:
        start = outputs(bundle)
        backend.keep_policy("old")
        train_step(backend, bundle.model, 0)
        now = outputs(bundle)  # the root keeps its gathered weights after a forward
        with backend.using_policy("old"):
            assert torch.equal(outputs(bundle), start)
        assert torch.equal(outputs(bundle), now) and not torch.equal(now, start)
    finally:
        backend.close()


@pytest.fixture
def is_always_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 on one device too, as for cpu_offload, which a CPU has not."""
    for module in ("build", "trained_model"):
        monkeypatch.setattr(f"unirl.train.backend.{module}.is_sharding", lambda config: True)


@pytest.mark.usefixtures("is_always_sharding")
def test_the_group_of_one_process_ends_with_the_backend():
    backend = make_backend(fsdp=FSDPConfig(param_dtype="bf16"))
    assert torch.distributed.is_initialized()
    backend.close()
    backend.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("param_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
def test_mixed_precision_on_one_device_has_the_bits_of_fsdp(
    mode: str, param_dtype: str, frozen: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Outputs, gradients of several micro-batches, states with copies and averages, weights as engines and files get
    them; and a state of one is the other's."""
    found: list[dict[str, torch.Tensor]] = []
    backends = []
    for is_sharding in (True, False):
        for module in ("build", "trained_model"):
            monkeypatch.setattr(f"unirl.train.backend.{module}.is_sharding", lambda config, value=is_sharding: value)
        bundle = TinyBundle()
        bundle.model.to(frozen)
        fsdp = FSDPConfig(param_dtype=param_dtype)
        backend = make_backend(bundle, fsdp=fsdp, ema=EMAConfig(decay=0.5, warmup=False), **MODES[mode])
        assert backend.is_sharded == is_sharding
        backend.keep_policy("old")
        for step in range(3):
            train_step(backend, bundle.model, step)
        run_backward(backend, bundle.model, 3, num_micros=4)
        result = {f"grad/{name}": whole(p.grad) for name, p in backend.parameters.items() if p.grad is not None}
        result |= {"now": outputs(bundle), **{f"state/{name}": t for name, t in snapshot(backend).items()}}
        for name in ("old", "ema"):
            with backend.using_policy(name):
                result[name] = outputs(bundle)
        for policy in (None, "ema"):
            result |= {f"{policy}/{name}": tensor.clone() for name, tensor in backend.weight_source.weights(policy)}
            for where in ("kept", "device"):
                for name, tensor in backend.weight_source.weights(policy, where=where):
                    assert torch.equal(tensor, result[f"{policy}/{name}"])
        for shard in backend.weight_source.shards():
            result[f"shard/{shard.name}"] = shard.rows.clone()
            assert backend.weight_source.shard_rows()[shard.name][1] == shard.rows.dtype
        result |= load_merged(backend, bundle, tmp_path / str(is_sharding))
        found.append(result)
        backends.append((backend, bundle))
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert tensor.dtype == found[1][name].dtype and torch.equal(tensor, found[1][name]), name
    assert backends[0][0].architecture() == backends[1][0].architecture()
    for backend, _ in backends:
        backend.close()


def load_merged(backend: Any, bundle: TinyBundle, folder: Path) -> dict[str, torch.Tensor]:
    Exporter(backend, bundle).export_merged(str(folder))
    return {f"file/{name}": tensor for name, tensor in load_file(folder / "transformer.safetensors").items()}


class Operators(TorchDispatchMode):
    """Counts what computes; views do not."""

    VIEWS = ("view", "t", "alias", "detach", "_unsafe_view", "reshape")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operators(bundle: TinyBundle) -> Counter[str]:
    with torch.no_grad(), Operators() as seen:
        bundle.model(rows(0)[0].bfloat16())
    return seen.counts


def test_on_one_device_a_forward_in_bfloat16_takes_the_operators_of_the_plain_model_and_two_per_adapter():
    plain = TinyBundle()
    keep_in(plain.model.parameters(), torch.bfloat16)
    full, adapted = TinyBundle(), TinyBundle()
    make_backend(full, fsdp=FSDPConfig(param_dtype="bf16"))
    make_backend(adapted, fsdp=FSDPConfig(param_dtype="bf16"), lora=lora_config())
    assert operators(full) == operators(plain)
    assert operators(adapted) - operators(plain) == {"mm": 4, "addmm": 4}  # 2 blocks of 2 layers


def test_a_fused_adapter_computes_what_pefts_does_with_the_same_draws():
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 6))
        inject_lora({"one": module}, LoraConfig(rank=2, alpha=3.0), ["0"], is_fused=is_fused)
        module.double()
        nn.init.normal_(module.get_parameter("0.lora_B.default.weight"))
        x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
        y = module(x)
        y.square().sum().backward()
        with adapters_disabled({"one": module}):
            base = module(x)
        assert torch.equal(base, module.get_submodule("0.base_layer")(x))
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([y.detach(), x.grad, *gradients, *module.state_dict().values()])
    assert len(found[0]) == len(found[1]) == 8
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def gradients_with(**options: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    bundle = TinyBundle()
    backend = make_backend(bundle, fsdp=FSDPConfig(**options))
    run_backward(backend, bundle.model, 0)
    gradients = {name: p.grad.clone() for name, p in backend.parameters.items() if p.grad is not None}
    return gradients, list(bundle.model.state_dict())


@pytest.mark.parametrize("how", [True, "full", "selective"])
def test_recomputing_activations_changes_neither_gradients_nor_names(how):
    expected, names = gradients_with()
    found, found_names = gradients_with(activation_checkpointing=how)
    assert found_names == names and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.matrix
@pytest.mark.parametrize("how", [False, "full", "selective"])
def test_compiling_blocks_changes_neither_gradients_nor_names(how):
    expected, names = gradients_with()
    torch.compiler.reset()
    counters.clear()
    found, found_names = gradients_with(compile=True, activation_checkpointing=how)
    assert counters["frames"]["ok"] > 0
    assert found_names == names and found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_a_block_class_that_is_not_there_names_those_that_are():
    bundle = TinyBundle()
    bundle.block_class_names = ("OtherBlock",)
    with pytest.raises(ConfigError, match="no block of class OtherBlock.*TinyBlock, TinyModel"):
        make_backend(bundle)


def test_options_that_would_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="cpu_offload does nothing on device cpu"):
        make_backend(fsdp=FSDPConfig(cpu_offload=True))
    with pytest.raises(ConfigError, match="activation_offload does nothing on device cpu"):
        make_backend(fsdp=FSDPConfig(activation_offload=True))
    with pytest.raises(ConfigError, match="activation_offload moves nothing of compiled blocks"):
        FSDPConfig(activation_offload=True, compile=True)
    with pytest.raises(ConfigError, match="dp_replicate = 2 does not divide 1 devices"):
        make_backend(topology=TrainTopology(dp_replicate=2))


def test_frozen_half_precision_weights_cannot_compute_in_float32():
    bundle = TinyBundle()
    bundle.model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="frozen in torch.bfloat16"):
        make_backend(bundle, lora=lora_config())
    bundle = TinyBundle()
    bundle.model.to(torch.bfloat16)
    full = make_backend(bundle)
    assert {p.dtype for p in full.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("mode", list(MODES))
def test_offloading_and_onloading_keep_every_value(mode: str):
    backend, bundle = trained(mode, ema=EMAConfig())
    run_backward(backend, bundle.model, 5)
    before = snapshot(backend)
    gradients = [p.grad.clone() for p in backend.parameters.values() if p.grad is not None]
    backend.offload()
    backend.onload()
    after = snapshot(backend)
    assert all(torch.equal(before[name], after[name]) for name in before)
    kept = [p.grad for p in backend.parameters.values() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients, strict=True))
    assert not backend.optimizer_step(1.0).is_skipped


# LoRA -------------------------------------------------------------------------------------------------------------


def test_targets_that_match_nothing_name_the_layers_that_exist():
    with pytest.raises(ConfigError, match=r"\['nothing'\] match no layer of transformer.*blocks.0.to_q"):
        make_backend(lora=LoraConfig(rank=2, alpha=2.0, target_modules=["nothing"]))
    with pytest.raises(ConfigError, match=r"\['to_k'\] match no layer"):
        make_backend(lora=LoraConfig(rank=2, alpha=2.0, target_modules=["to_q", "to_k"]))
    with pytest.raises(ConfigError, match="is a TinyBlock, no nn.Linear"):
        make_backend(lora=LoraConfig(rank=2, alpha=2.0, target_modules=["blocks.0"]))


def test_every_component_gets_adapters_of_its_own():
    backend = make_backend(TinyBundle(num_components=2), lora=lora_config())
    assert {name.split(".")[0] for name in backend.parameters} == {"transformer", "transformer_2"}
    assert len(backend.parameters) == 16


def test_exported_adapters_have_pefts_names_and_the_policys_values(tmp_path: Path):
    backend, bundle = trained("lora")
    for policy in ("default", "old"):
        Exporter(backend, bundle).export_lora(str(tmp_path / policy), policy)
        file = tmp_path / policy / "transformer.safetensors"
        weights = load_file(file)
        assert len(weights) == 8
        (tmp_path / "new").touch()
        assert file.stat().st_mode == (tmp_path / "new").stat().st_mode
        key = "blocks.0.to_q.lora_B.weight"
        expected = backend.policies.values(policy)["transformer.blocks.0.to_q.lora_B.default.weight"]
        assert torch.equal(weights[key], expected)
    with pytest.raises(ConfigError, match="export_merged"):
        Exporter(make_backend(), bundle).export_lora(str(tmp_path))


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("policy", ["default", "old"])
def test_the_exported_model_computes_what_the_policy_computes(mode: str, policy: str, tmp_path: Path):
    backend, bundle = trained(mode)
    expected = outputs(bundle)
    if policy == "old":
        with backend.using_policy("old"):
            expected = outputs(bundle)
    Exporter(backend, bundle).export_merged(str(tmp_path), policy)
    plain = TinyBundle(seed=3)
    plain.model.load_state_dict(load_file(tmp_path / "transformer.safetensors"))
    # LoRA: W + s B A in one product instead of two, in float32.
    torch.testing.assert_close(outputs(plain), expected, rtol=1e-5, atol=1e-6 if mode == "lora" else 0.0)


def test_an_update_that_bfloat16_rounds_away_is_told_of_and_kept_in_float32(tmp_path: Path):
    """Weights of 1, whose neighbours in bfloat16 are 2^-7 above and 2^-8 below."""
    bundle = TinyBundle()
    for parameter in bundle.model.bfloat16().parameters():
        parameter.data.fill_(1.0)
    fsdp = FSDPConfig(param_dtype="bf16", master_dtype="fp32")
    backend = make_backend(bundle, lora=lora_config(), fsdp=fsdp)
    for name, parameter in backend.parameters.items():
        # The first block grows by less than half of the way to the next value, the second by all of it.
        grows = 2.0**-10 if "blocks.0" in name else 2.0**-7
        parameter.data.fill_(grows / lora_config().alpha if ".lora_B." in name else 1.0)
    exporter = Exporter(backend, bundle)
    lost = exporter.export_merged(str(tmp_path / "rounded"))
    assert lost is not None and lost.dtype == "bfloat16"
    assert lost.unchanged_fraction == 0.5
    assert lost.norm_fraction == pytest.approx((2.0**-20 / (2.0**-20 + 2.0**-14)) ** 0.5)
    kept = exporter.export_merged(str(tmp_path / "kept"), in_float32=True)
    assert kept is not None and (kept.dtype, kept.norm_fraction, kept.unchanged_fraction) == ("float32", 0.0, 0.0)
    rounded = load_file(tmp_path / "rounded" / "transformer.safetensors")
    whole = load_file(tmp_path / "kept" / "transformer.safetensors")
    assert bool((rounded["blocks.0.to_q.weight"] == 1).all())
    assert bool((whole["blocks.0.to_q.weight"] == 1 + 2.0**-10).all())
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_a_full_fine_tuning_is_exported_as_it_was_trained(master: str, tmp_path: Path):
    """For a model that was loaded in bfloat16: float32 masters keep what bfloat16 would round away."""
    bundle = TinyBundle()
    bundle.model.bfloat16()
    backend = make_backend(bundle, lr=1e-5, fsdp=FSDPConfig(param_dtype="bf16", master_dtype=master))
    train_step(backend, bundle.model, 0)
    for name, in_float32 in (("own", False), ("whole", True)):
        assert Exporter(backend, bundle).export_merged(str(tmp_path / name), in_float32=in_float32) is None
        found = load_file(tmp_path / name / "transformer.safetensors")
        for key, parameter in backend.parameters.items():
            written = found[key.removeprefix("transformer.")]
            assert written.dtype == (torch.float32 if in_float32 else parameter.dtype)
            assert torch.equal(written.float(), whole(parameter).float())
    if master == "fp32":
        assert not all(
            torch.equal(value, value.bfloat16().float()) for value in map(whole, backend.parameters.values())
        )


def test_a_state_of_other_options_is_refused_by_name():
    backend, _ = trained("full")
    state = {name: tensor.clone() for name, tensor in backend.state_dict().items()}
    with pytest.raises(CheckpointError, match="unexpected .*policies/old"):
        make_backend().load_state_dict(state)


class RoutingBundle(TinyBundle):
    """Stands for a model whose rows go to one of two experts."""

    any_rank: Callable[[bool], bool] | None = None

    def follow_ranks(self, any_rank: Callable[[bool], bool]) -> None:
        """Remember how to ask."""
        self.any_rank = any_rank


def test_a_bundle_of_experts_that_is_whole_follows_no_ranks():
    bundle = RoutingBundle(num_components=2)
    make_backend(bundle)
    assert bundle.any_rank is None


@pytest.mark.usefixtures("is_always_sharding")
def test_a_bundle_of_experts_follows_the_ranks_where_it_is_sharded():
    sharded = RoutingBundle(num_components=2)
    backend = make_backend(sharded, fsdp=FSDPConfig(param_dtype="bf16"))
    try:
        assert sharded.any_rank is not None and sharded.any_rank(True) and not sharded.any_rank(False)
    finally:
        backend.close()


@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
def test_shards_exchange_their_values_together_or_one_by_one(monkeypatch, limit):
    monkeypatch.setattr(policies, "_EXCHANGED_BYTES", limit)
    mine = [torch.randn(size) for size in (3, 1, 0, 20, 2)] + [torch.randn(4, 6, dtype=torch.float64).T]
    copies = [torch.randn_like(each) for each in mine]
    before, versions = [each.clone() for each in (*mine, *copies)], [each._version for each in mine]
    places = [each.data_ptr() for each in (*mine, *copies)]
    policies._exchange_values(list(zip(mine, copies, strict=True)))
    assert all(torch.equal(now, then) for now, then in zip((*copies, *mine), before, strict=True))
    assert [each.data_ptr() for each in (*mine, *copies)] == places
    assert all(now._version > then for now, then in zip(mine, versions, strict=True))
