"""What engines with separate weights take of a device: formulas, since they are other processes."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.app.rehearsal.categories import ACTIVATIONS, ENGINE
from unirl.app.rehearsal.share import Share
from unirl.config.placement import groups_of_run
from unirl.config.runs import ComposedRun
from unirl.rehearsal.ledger import Peak
from unirl.types.precision import dtype_named
from unirl.types.recipe import Stage

SAMPLING = ("rollout", "eval")
"""Phases in which engines sample."""


def with_engines(
    peaks: Mapping[str, Peak], run: ComposedRun, share: Share, weights: Mapping[str, int], device_bytes: float
) -> dict[str, Peak]:
    """Peaks by phase with the engines of `share.apart`; those on other devices than the trainer get a row "engine".

    weights: numbers in the model of each policy.
    """
    train = groups_of_run(run)[0]
    here = [stage for stage in share.apart if stage.at in train.holds]
    elsewhere = [stage for stage in share.apart if stage not in here]
    sampled = [phase for phase in SAMPLING if phase in peaks]
    activations = max(peaks[phase].parts.get(ACTIVATIONS, 0) for phase in sampled)
    found = dict(peaks)
    if not any(_computes_as_direct(stage) for stage in run.stages if stage not in elsewhere):
        found.update({phase: _without(peaks[phase], ACTIVATIONS) for phase in sampled})
    held = sum(_held_bytes(stage, weights[stage.policy], device_bytes) for stage in here)
    is_away = {"train"} if run.file.residency.sleep_engine else set[str]()
    for phase in found:
        if held and phase not in is_away:
            found[phase] = _with(found[phase], ENGINE, held)
    for stage in elsewhere:
        own = _with(Peak(), ENGINE, _held_bytes(stage, weights[stage.policy], device_bytes))
        found[ENGINE] = _with(own, ACTIVATIONS, activations) if _computes_as_direct(stage) else own
    return found


def _held_bytes(stage: Stage, num_weights: int, device_bytes: float) -> int:
    """Bytes of each device that an engine keeps."""
    engine = stage.engine
    own = num_weights * dtype_named(engine.get("dtype", "bf16"), f"{engine.at}.dtype").itemsize
    own //= engine.get("num_devices") or 1
    if _computes_as_direct(stage):
        return own
    if cache := engine.get("kv_cache_bytes"):
        return own + int(cache)
    options = engine.get("engine_args") or {}
    named = [options[name] for name in engine.ability("share_options") if name in options]
    chosen = named[0] if named else engine.ability("device_share")
    return round(float(chosen) * device_bytes)


def _computes_as_direct(stage: Stage) -> bool:
    """True if what a forward takes is that of direct sampling, in addition to what the engine keeps."""
    return stage.engine.ability("device_share") is None


def _with(peak: Peak, category: str, num_bytes: int) -> Peak:
    return Peak(peak.num_bytes + num_bytes, {**peak.parts, category: peak.parts.get(category, 0) + num_bytes})


def _without(peak: Peak, category: str) -> Peak:
    parts = {name: size for name, size in peak.parts.items() if name != category}
    return Peak(sum(parts.values()), parts)
