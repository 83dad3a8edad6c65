"""Which arguments of a component come from wiring, not from the recipe. The checker and the wiring agree on this."""

from __future__ import annotations

INJECTED: dict[str, frozenset[str]] = {
    "bundle": frozenset({"device"}),
    "pipeline": frozenset({"bundle"}),
    "backend": frozenset({"bundle", "device"}),
    "engine": frozenset({"pipeline", "policies"}),
    "algorithm": frozenset({"pipeline", "policies"}),
    "stack": frozenset({"backend", "algorithm"}),
    "reward": frozenset({"device"}),
    "data": frozenset({"seed"}),
    "sampling": frozenset(),
    "advantages": frozenset(),
    "sync": frozenset({"backend", "engine", "pipeline", "rank"}),
    "trainer": frozenset(
        {
            "runtime",
            "settings",
            "data",
            "sampling",
            "advantages",
            "evaluator",
            "guardrails",
            "trackers",
            "run_dir",
            "config",
            "rollout_policy",
            "stop",
            "selection",
            "sync",
            "clock",
        }
    ),
}
"""Section of a recipe -> keyword arguments that `unirl.trainer.wiring` adds when it builds the section."""

INJECTED_IF_TAKEN: dict[str, frozenset[str]] = {"engine": frozenset({"device", "rank"})}
"""What it adds besides where the section's target has such an argument."""
