"""A plan as lines for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unirl.app.plan.predict import MAKING, STEP, Seconds
from unirl.app.plan.rates import Clock
from unirl.app.rehearsal.rehearse import Rehearsed
from unirl.config.placement import groups_of_run
from unirl.config.runs import ComposedRun
from unirl.trainer.loops.forecast import SPREAD, Durations, Forecast, forecast

PIPELINED = "pipelined"


@dataclass(frozen=True)
class Ahead:
    """A schedule whose parts work at the same time."""

    kind: str
    max_staleness: int
    requests: int
    """Per rollout."""


@dataclass(frozen=True)
class Plan:
    """How long the steps of a recipe take on one kind of device."""

    recipe: str
    device: str
    peak_flops: float
    num_ranks: int
    """Devices that train."""
    engine_devices: int
    """Devices with engines that do not train; 0 where devices do both."""
    num_samples: int
    """Samples of a step, over all devices."""
    phases: Mapping[str, Seconds]
    """Seconds of one device, with the rollout spread over the devices that sample."""
    eval_interval: int
    """Rollouts between evaluations; 0 without any."""
    ahead: Ahead | None = None
    """What its schedule collects ahead; None in sync."""

    @property
    def making_s(self) -> float:
        """Seconds until samples have scores."""
        return self._seconds(MAKING)

    @property
    def training_s(self) -> float:
        """Seconds in which they are trained on."""
        return self._seconds(("train",))

    @property
    def sync_s(self) -> float:
        """Seconds of a step whose phases wait for each other."""
        return self._seconds(STEP)

    @property
    def overlapped_s(self) -> float:
        """Seconds of a step during which the next samples are made, on other devices."""
        return max(self.making_s, self.training_s) + self._seconds(("push",))

    def scheduled(self, ahead: Ahead) -> Forecast:
        """Steps of a schedule whose engine, reward and training stand apart and take one request at a time."""
        durations = Durations(*(self._seconds((phase,)) for phase in STEP))
        return forecast(
            durations,
            per_rollout=ahead.requests,
            max_staleness=ahead.max_staleness,
            is_pipelined=ahead.kind == PIPELINED,
        )

    @property
    def most(self) -> str:
        """The phase that takes longest."""
        return max((phase for phase in self.phases if phase in STEP), key=lambda phase: self.phases[phase].wall_s)

    def _seconds(self, phases: tuple[str, ...]) -> float:
        return sum(self.phases[phase].wall_s for phase in phases if phase in self.phases)


def plan_of(run: ComposedRun, found: Rehearsed, phases: Mapping[str, Seconds], clock: Clock) -> Plan:
    """The plan of a run from its phases."""
    train, *others = groups_of_run(run)
    engines = [group for group in others if any(stage.at in group.holds for stage in run.stages)]
    engine_devices = sum(len(group.devices) for group in engines)
    spread = found.num_ranks / engine_devices if engine_devices else 1.0
    placed = {name: each.times(spread) if name in ("rollout", "eval") else each for name, each in phases.items()}
    root = next(iter(found.works.values()))
    return Plan(
        recipe=found.recipe,
        device=clock.name,
        peak_flops=clock.peak_flops,
        num_ranks=found.num_ranks,
        engine_devices=engine_devices,
        num_samples=root.num_samples * found.num_ranks // max(run.policy.ranks_per_sample, 1),
        phases=placed,
        eval_interval=0 if run.evaluation is None else int(run.evaluation.get("interval") or 0),
        ahead=_ahead(run),
    )


def _ahead(run: ComposedRun) -> Ahead | None:
    schedule = run.file.schedule
    if schedule.kind == "sync":
        return None
    return Ahead(schedule.kind, schedule.staleness, run.batch_size // (schedule.groups_per_request or run.batch_size))


def lines(plan: Plan) -> Iterator[str]:
    """Seconds by phase, then what a step takes."""
    devices = f"{plan.num_ranks} device{'s' if plan.num_ranks > 1 else ''}"
    if plan.engine_devices:
        devices += f" that train and {plan.engine_devices} that sample"
    rate = plan.num_samples / plan.sync_s
    yield f"{plan.recipe} on {devices}, {plan.device}: about {_s(plan.sync_s)} per step, {rate:.3g} samples per second"
    for name, phase in plan.phases.items():
        if name not in (*STEP, "eval"):
            continue
        mark = "  <- most" if name == plan.most else ""
        used = phase.flops / plan.peak_flops / phase.wall_s
        yield (
            f"  {name:8} {_s(phase.wall_s):>8}: device {_s(phase.device_s)}, host {_s(phase.host_s)}, links "
            f"{_s(phase.sent_s)}; {used:.2f} of the matrix rate, waits for the {phase.bound}{mark}"
        )
    if plan.eval_interval and "eval" in plan.phases:
        share = plan.phases["eval"].wall_s / plan.eval_interval
        yield f"  evaluations every {plan.eval_interval} rollouts add {_s(share)} per step"
    if plan.ahead is not None:
        yield from _schedule_lines(plan, plan.ahead)
    elif plan.engine_devices:
        making, training = plan.making_s / plan.sync_s, plan.training_s / plan.sync_s
        yield f"  in sync, devices that sample work {making:.0%} of a step and those that train {training:.0%}"
        waits = "training" if plan.making_s < plan.training_s else "samples"
        yield f"  with both at once {_s(plan.overlapped_s)} per step, which wait for {waits}"


def _schedule_lines(plan: Plan, ahead: Ahead) -> Iterator[str]:
    """What the schedule takes, and others."""
    if not plan.engine_devices:
        yield "  its schedule has engine and training work at once on one device, which a plan does not count"
        return
    sizes = tuple(dict.fromkeys((1, 4, ahead.requests)))
    others = [Ahead("async", staleness, requests) for staleness in (0, 1, 2) for requests in sizes]
    own = ahead if ahead.kind == PIPELINED else replace(ahead, kind="async")
    for each in dict.fromkeys([own, *others]):
        found = plan.scheduled(each)
        works = ", ".join(f"{part} {found.share(part):.0%}" for part in found.worked_s)
        name = "its schedule" if each == own else "another"
        said = PIPELINED if each.kind == PIPELINED else f"max_staleness: {each.max_staleness}"
        yield (
            f"  {name:12} {said}, requests per rollout: {each.requests}; {_s(found.step_s)} per step; at work: {works}"
        )
    yield f"  single calls take more or less than their mean (log-normal, sigma {SPREAD:g})"


def as_json(plan: Plan) -> dict[str, Any]:  # Any: JSON
    """The same for programs."""
    return {
        "recipe": plan.recipe,
        "device": plan.device,
        "devices": {"train": plan.num_ranks, "engine": plan.engine_devices},
        "samples": plan.num_samples,
        "step_s": plan.sync_s,
        "overlapped_step_s": plan.overlapped_s if plan.engine_devices else None,
        "schedule": None if plan.ahead is None or not plan.engine_devices else _schedule_json(plan, plan.ahead),
        "phases": {
            name: {
                "wall_s": phase.wall_s,
                "device_s": phase.device_s,
                "host_s": phase.host_s,
                "links_s": phase.sent_s,
                "flops": phase.flops,
            }
            for name, phase in plan.phases.items()
        },
    }


def _schedule_json(plan: Plan, ahead: Ahead) -> dict[str, Any]:  # Any: JSON
    found = plan.scheduled(ahead)
    return {
        "kind": ahead.kind,
        "max_staleness": ahead.max_staleness,
        "requests": ahead.requests,
        "step_s": found.step_s,
        "at_work": {part: found.share(part) for part in found.worked_s},
    }


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
