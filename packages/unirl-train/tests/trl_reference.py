"""TRL's own loss functions, for comparison on the same tensors.

Importing TRL's trainer takes fifteen seconds of CPU, all of it in what surrounds the mathematics; the functions are
taken from the installed file instead, and meet a trainer made of the attributes that they read.
"""

import ast
import importlib.util
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _trainer_file(name: str) -> Path:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / name


def _functions(file: str, names: set[str]) -> dict[str, Any]:
    path = _trainer_file(file)
    tree = ast.parse(path.read_text())
    wanted: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    namespace: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(ast.Module(body=wanted, type_ignores=[]), str(path), "exec"), namespace)
    assert names <= namespace.keys(), "TRL has moved its functions"
    return {name: namespace[name] for name in names}


HELPERS = _functions("utils.py", {"nanmin", "nanmax"})
COMPUTE_LOSS = _functions("grpo_trainer.py", {"_compute_loss"})["_compute_loss"]
COMPUTE_LOSS.__globals__.update(HELPERS)
GAMMA_WEIGHTS = _functions("grpo_trainer.py", {"get_gamma_weights"})["get_gamma_weights"]
GMPO_LOSS = _functions("../experimental/gmpo/gmpo_trainer.py", {"_compute_loss"})["_compute_loss"]
GMPO_LOSS.__globals__.update(HELPERS)


def _branches_on(attribute: str, file: str) -> ast.If:
    """The `if self.<attribute> == ...` of a file of TRL's trainers."""
    found = [
        node
        for node in ast.walk(ast.parse(_trainer_file(file).read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith(f"self.{attribute} == ")
    ]
    assert found, "TRL has moved its branches"
    return found[0]


def trl_advantages(rewards_BK: Tensor, weights_K: Tensor, *, num_generations: int, aggregation: str) -> Tensor:
    """GRPOTrainer's advantages of a batch, groups of `num_generations` next to each other.

    aggregation: multi_objective_aggregation; K reward functions with scale_rewards = "group".
    """
    code = ast.Module(body=[_branches_on("multi_objective_aggregation", "grpo_trainer.py")], type_ignores=[])
    names: dict[str, Any] = {
        "torch": torch,
        "nanstd": _functions("utils.py", {"nanstd"})["nanstd"],
        "self": SimpleNamespace(
            multi_objective_aggregation=aggregation,
            scale_rewards="group",
            reward_weights=weights_K,
            reward_funcs=[None] * rewards_BK.shape[1],
        ),
        "rewards_per_func": rewards_BK,
        "num_generations": num_generations,
        "unscorable_mask": torch.isnan(rewards_BK).all(dim=1),
        "device": rewards_BK.device,
    }
    exec(compile(code, "grpo_trainer.py", "exec"), names)
    return names["advantages"]


def grpo_trainer_loss(
    logp_BT: Tensor, old_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, *, loss_type: str, **options: Any
) -> Tensor:
    """GRPOTrainer's loss of one batch that is the whole batch, with these log-probs of the completion's tokens.

    options: importance_sampling_level, epsilon, epsilon_high, delta, beta and reference [B, T], ratio [B, T] or [B, 1]
    of the engine's correction, max_completion_length.
    """
    given = {"importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.0}
    given.update(options)
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=given["importance_sampling_level"],
        epsilon_low=given["epsilon"],
        epsilon_high=given["epsilon_high"],
        beta=given["beta"],
        max_completion_length=given.get("max_completion_length"),
        args=SimpleNamespace(
            delta=given["delta"],
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.25,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        get_gamma_weights=GAMMA_WEIGHTS,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm="ratio" in given,
        vllm_importance_sampling_correction="ratio" in given,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp_BT, torch.zeros_like(logp_BT), None),
    )
    prompts = torch.zeros(mask_BT.shape[0], 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.zeros_like(mask_BT, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": advantage_B,
        "old_per_token_logps": old_BT,
        "num_items_in_batch": mask_BT.sum(),
        "ref_per_token_logps": given.get("reference"),
        "importance_sampling_ratio": given.get("ratio"),
    }
    return (GMPO_LOSS if loss_type == "gmpo" else COMPUTE_LOSS)(trainer, None, inputs)
