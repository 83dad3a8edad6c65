"""The trainer of texts on a language model of a few numbers: learning, evaluation, tables, refills, resuming."""

import functools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runtime_fakes import InProcess
from token_fakes import FirstDigitReward, LMBundle, LMEngine, LMPipeline, sampling

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.selection import SampleSelection
from unirl.config.schema import Samples
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.held import Held
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import Builder, WorkerContext
from unirl.tracking.base import TableRow
from unirl.tracking.gallery import table_row, verdict
from unirl.tracking.sample_files import read_samples
from unirl.tracking.tables import markdown, shown
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack, TrainStepResult
from unirl.trainer.build.assembly import assemble
from unirl.trainer.evaluation import EvaluationConfig, pass_at
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.roles import SyncRole
from unirl.trainer.settings import TrainerSettings
from unirl.trainer.text import TextModality, count_tokens
from unirl.types.errors import ConfigError, ContractError, WorkerError
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import TextSegment


class Notes:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.tables: dict[tuple[str, int], list[TableRow]] = {}
        self.pictures: dict[tuple[str, int], Any] = {}

    def start(self, config: Mapping[str, Any], run_dir: Path, step: int) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged[step] = dict(metrics)

    def image(self, name: str, picture: Any, step: int, captions: Sequence[str]) -> None:
        self.pictures[name, step] = picture

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        raise AssertionError("a trainer of texts shows no video")

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        raise AssertionError("nothing here makes sounds")

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        self.tables[name, step] = list(rows)

    def alert(self, name: str, text: str, step: int) -> None:
        raise AssertionError("the guardrails are off")

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Pushes:
    """Stands for a weight sync: notes the policy's version at every push, between the engine's requests."""

    def __init__(self, backend: FSDPBackend, engine: LMEngine) -> None:
        self.backend = backend
        self.engine = engine
        self.seen: list[tuple[int, int]] = []
        self.is_prepared = False

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        self.is_prepared = True

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: str | None) -> dict[str, float]:
        assert self.is_prepared and policy is None
        self.seen.append((self.backend.policy_version, len(self.engine.requests)))
        return {"sync/tensors": 3.0}


class Shards:
    """Stands for the stack of one rank: keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[RolloutResp] = []

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def samples_per_unit(self) -> int:
        return 1

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def rollout_policy(self) -> str | None:
        return None

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def exact_ratios(self) -> list[str]:
        return []

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def trained_tracks(self) -> list[str]:
        return ["text"]

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def trace(self, samples: list[str]) -> None: ...

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def take_traces(self) -> list[dict[str, Any]]:
        return []

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        self.given.append(resp)
        return TrainStepResult({})


class TwoWorkers(InProcess):
    """Two workers of this process."""

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder, 2)

    def _places(self) -> Sequence[MeshPlace]:
        """Two data-parallel places; the backends, in one process, know nothing of each other."""
        return [MeshPlace(dp_rank=rank, dp_size=2) for rank in range(2)]

    def component(self, name: str) -> object:
        """A component of the first worker."""
        return self.workers[0].component(name)


class Run:
    """A trainer on fakes in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        evaluation: dict[str, Any] | None = None,
        selection: SampleSelection | None = None,
        same: Callable[[str], bool] = lambda group: False,
        samples: int = 8,
        syncs: bool = False,
        has_pictures: bool = False,
        runtime: type[LocalRuntime | TwoWorkers] = LocalRuntime,
        balance_tokens: bool = True,
        kept: Samples | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prompts = folder / "prompts.jsonl"
        rows = [
            {"prompt": text, "answer": "4", "category": f"c{len(text)}"} for text in ("1", "2", "35", "61", "5", "16")
        ]
        if has_pictures:
            Image.new("RGB", (9, 6), "blue").save(folder / "a.png")
            rows = [{**row, "images": ["a.png"] * (1 + i % 2)} for i, row in enumerate(rows)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.folder, self.notes = folder, Notes()

        def build(context: WorkerContext) -> dict[str, Any]:
            bundle = LMBundle()
            backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=5e-2))
            pipeline = LMPipeline(bundle.model)
            engine = LMEngine(pipeline, backend)
            return {
                "backend": backend,
                "engine": engine,
                "sync": Pushes(backend, engine),
                "stack": TrainStack(backend, ARGRPO(pipeline, backend), micro_batch_size=16, track="text")
                if context.world_size == 1
                else Shards(),
                "reward": FirstDigitReward(same),
                "checkpointer": Checkpointer(backend, str(folder / "checkpoints")),
            }

        self.runtime = runtime(build)
        data = MultimodalRLDataSource(str(prompts), shuffle=False)
        params = sampling(samples_per_prompt=samples, max_new_tokens=3, temperature=1.0)
        options: dict[str, Any] = {"prompts": str(prompts), "num_samples": 6, "batch_size": 5}
        config = EvaluationConfig(**{**options, **(evaluation or {})})
        defaults: dict[str, Any] = {"recipe": "fake", "seed": 3, "batch_size": 4, "num_rollouts": 2}
        self.trainer = assemble(
            self.runtime,
            TrainerSettings(**{**defaults, **settings}),
            modality=TextModality(balance_tokens=balance_tokens),
            data=data,
            sampling=params,
            advantages=AdvantageConfig(preset="dr_grpo"),
            evaluator=None if evaluation is None else config.evaluator(data.rows, params),
            guardrails=functools.partial(Guardrails, GuardrailConfig(action="off")),
            trackers=[self.notes],
            run_dir=folder,
            config={"recipe": "fake"},
            stop=threading.Event(),
            selection=selection,
            sync=self.runtime.role("sync", SyncRole) if syncs else None,
            samples=kept,
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What has been trained."""
        backend = self.runtime.component("backend")
        assert isinstance(backend, FSDPBackend)
        return dict(backend.parameters)

    @property
    def requests(self) -> list[Any]:
        """What the engine was asked."""
        return vars(self.runtime.component("engine"))["requests"]


def test_the_model_learns_the_digit_that_is_rewarded(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=15, evaluation={})
    summary = run.trainer.run()
    before, after = (summary[name]["overall"]["match"] for name in ("eval_before", "eval_after"))
    assert after >= before + 0.5
    assert summary["logp_gap"]["max"] < 1e-5
    assert summary["first_ratio_max_abs_dev"] == 0.0


def test_an_evaluation_is_greedy_and_tells_categories_apart(tmp_path: Path):
    run = Run(tmp_path, evaluation={"num_samples": 6}, num_rollouts=1)
    run.trainer.run()
    evaluated = [req for req in run.requests if req.rollout_id < 0]
    assert {req.sampling_params.temperature for req in evaluated} == {0.0}
    assert [req.batch_size for req in evaluated] == [5, 1, 5, 1]
    assert {"eval/match", "eval/c1/match", "eval/c2/match"} <= run.notes.logged[0].keys()


def test_a_prompt_that_is_too_long_stops_the_run_before_anything_is_sampled(tmp_path: Path):
    run = Run(tmp_path)
    vars(run.runtime.component("engine"))["longest"] = 1
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: prompt 2 of the batch has 2 tokens"):
        run.trainer.run()
    assert run.requests == []


def test_pass_at_k_is_the_fraction_of_all_choices_of_k_with_a_right_one():
    for size, right in ((5, 2), (4, 0), (3, 3), (6, 1)):
        is_right = [True] * right + [False] * (size - right)
        for k in range(1, size + 1):
            choices = list(combinations(is_right, k))
            assert pass_at(k, right, size) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_measured_on_draws_of_its_own(tmp_path: Path):
    run = Run(tmp_path, evaluation={"pass_at": [1, 4], "pass_samples": 4, "pass_prompts": 3}, num_rollouts=1)
    summary = run.trainer.run()
    overall = summary["eval_before"]["overall"]
    assert 0 <= overall["pass@1"] <= overall["pass@4"] <= 1
    sampled = [req for req in run.requests if req.rollout_id == -2]
    assert sum(req.batch_size for req in sampled) == 2 * 3 * 4  # before and after
    assert {req.sampling_params.temperature for req in sampled} == {1.0}
    assert summary["eval_before"] == {**summary["eval_before"], "num_samples": 6}


def test_completions_lie_in_the_run_directory_and_reach_the_trackers(tmp_path: Path):
    run = Run(tmp_path, evaluation={}, kept=Samples(per_evaluation=5), num_rollouts=2, media_interval=2)
    run.trainer.run()
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "eval-000000.jsonl",
        "eval-000002.jsonl",
        "rollout-000002",
        "rollout-000002.jsonl",
    ]
    rows = run.notes.tables["rollout", 2]
    kept = read_samples(tmp_path / "samples" / "rollout-000002.jsonl")
    assert [table_row(record) for record in kept[:16]] == rows and len(kept) == 32
    assert {"prompt", "completion", "tokens", "end", "answer", "reward", "match", "advantage"} == rows[0].keys()
    assert len(run.notes.tables["eval", 0]) == 5
    assert {row["end"] for row in rows} <= {"completed", "truncated"}


def test_a_trainer_of_texts_alone_draws_no_pictures(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, evaluation={}, media_interval=1)
    run.trainer.run()
    assert run.notes.tables and not run.notes.pictures


def test_questions_about_pictures_are_shown_with_them_and_whether_they_were_answered(tmp_path: Path):
    run = Run(
        tmp_path, num_rollouts=2, evaluation={}, kept=Samples(per_evaluation=5), media_interval=2, has_pictures=True
    )
    run.trainer.run()
    rows = run.notes.tables["rollout", 2]
    assert len(rows) == 16 and {row["images"] for row in rows} == {"a.png", "a.png, a.png"}
    assert run.notes.pictures.keys() == {("eval", 0), ("eval", 2), ("rollout", 2)}
    for (name, step), picture in run.notes.pictures.items():
        with Image.open(tmp_path / "samples" / f"{name}-{step:06d}.png") as saved:
            assert saved.size == picture.size
    assert len(run.notes.tables["eval", 0]) == 5
    blue = (torch.tensor(np.array(run.notes.pictures["eval", 0])) == torch.tensor([0, 0, 255])).all(-1)
    # Cells of 160 pixels, images of 9 x 6 enlarged 17 times; prompts 1 to 5 show 1, 2, 1, 2 and 1 of them.
    num_pictures = sum(1 + str(row["images"]).count(",") for row in run.notes.tables["eval", 0])
    assert int(blue.sum()) == num_pictures * (9 * 17) * (6 * 17)


def test_a_completion_is_called_right_only_where_there_is_a_right_answer():
    assert verdict({"completion": "4", "reward": 1.0, "answer": "4"}) == ("4: right", True)
    assert verdict({"completion": "5", "reward": 0.5, "answer": "4"}) == ("5: wrong, 4", False)
    assert verdict({"completion": "5", "reward": 0.5}) == ("5 (reward 0.5)", None)


def test_dynamic_sampling_replaces_groups_that_teach_nothing(tmp_path: Path):
    run = Run(
        tmp_path,
        num_rollouts=1,
        samples=16,
        selection=SampleSelection(dynamic_sampling=True),
        same=lambda group: not group.startswith("refill"),
    )
    run.trainer.run()
    first, *refills = run.requests
    assert first.batch_size == 64 and refills and refills[0].batch_size == 64
    assert all(name.startswith("refill") for name in refills[0].group_ids)
    assert run.notes.logged[1]["group/trained_samples"] == 64
    assert run.notes.logged[1]["group/zero_std_ratio"] < 1


def test_each_policy_is_pushed_once_before_anything_is_sampled_from_it(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=3, evaluation={"num_samples": 5}, eval_interval=2, syncs=True)
    run.trainer.run()
    pushes = run.runtime.component("sync")
    assert isinstance(pushes, Pushes)
    # Evaluations stand before the first rollout, after the second and after the last.
    assert pushes.seen == [(0, 0), (1, 2), (2, 3), (3, 5)]
    assert [version for version, _ in pushes.seen] == [0, 1, 2, 3]
    assert run.notes.logged[1]["timing_s/sync"] > 0
    assert all(run.notes.logged[step]["sync/tensors"] == 3 for step in (0, 2, 3))


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path):
    whole = Run(tmp_path / "whole", num_rollouts=4)
    whole.trainer.run()
    Run(tmp_path / "parts", num_rollouts=2).trainer.run()
    rest = Run(tmp_path / "parts", num_rollouts=4)
    rest.trainer.run(resume="auto")
    mine, theirs = rest.weights, whole.weights
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pass_at": [9]}, r"pass_at \[9\] must lie in 1 .. eval.pass_samples = 8"),
        ({"pass_samples": 0}, "pass_samples = 0"),
        ({"interval": -1}, "interval = -1"),
    ],
)
def test_evaluations_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(prompts="", **options)


def test_an_unknown_metric_of_pass_at_k_is_named(tmp_path: Path):
    run = Run(tmp_path, evaluation={"pass_at": [1], "pass_metric": "exactness"})
    with pytest.raises(ConfigError, match="exactness is not among the scores reward, match"):
        run.trainer.run()


def test_tables_keep_both_ends_of_a_long_text_and_escape_what_markdown_would_read():
    assert shown("a\n b", 10) == "a b"
    assert shown(1 / 3, 10) == "0.3333"
    cut = shown("begin " + "x" * 100 + " end", 40)
    assert len(cut) <= 40 and cut.startswith("begin") and cut.endswith("end")
    assert markdown([{"a": "x|y"}, {"b": math.pi}]) == "| a | b |\n| --- | --- |\n| x\\|y |  |\n|  | 3.142 |"


# Failures -----------------------------------------------------------------------------------------------------------


def failing(run: Run, role: str, method: str, at: Callable[[int], bool]) -> None:
    """Let calls of a component fail whose number `at` says yes to."""
    component: Any = run.runtime.component(role)
    work, numbers = getattr(component, method), count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if at(next(numbers)):
            raise WorkerError("vLLM (pid 7)", "died")
        return work(*args, **kwargs)

    setattr(component, method, call)


def test_an_engine_that_dies_leaves_a_checkpoint_of_the_rollouts_before_and_the_run_goes_on_bit_for_bit(tmp_path: Path):
    whole = Run(tmp_path / "whole", num_rollouts=4)
    whole.trainer.run()
    broken = Run(tmp_path / "parts", num_rollouts=4)
    failing(broken, "engine", "generate", lambda number: number == 3)
    with pytest.raises(WorkerError, match="died"):
        broken.trainer.run()
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-000002"]
    assert sorted(broken.notes.logged) == [1, 2]
    rest = Run(tmp_path / "parts", num_rollouts=4)
    rest.trainer.run(resume="auto")
    mine, theirs = rest.weights, whole.weights
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [req.sample_ids for req in rest.requests] == [req.sample_ids for req in whole.requests[2:]]


def test_a_failed_refill_is_forgotten_too(tmp_path: Path):
    options: dict[str, Any] = {"num_rollouts": 3, "selection": SampleSelection(dynamic_sampling=True), "samples": 16}
    options["same"] = lambda group: not group.startswith("refill") and group.endswith("35")
    whole = Run(tmp_path / "whole", **options)
    whole.trainer.run()
    refills = [number for number, req in enumerate(whole.requests, 1) if req.sample_ids[0].startswith("refill")]
    broken = Run(tmp_path / "parts", **options)
    failing(broken, "engine", "generate", lambda number: number == refills[-1])
    with pytest.raises(WorkerError):
        broken.trainer.run()
    rest = Run(tmp_path / "parts", **options)
    rest.trainer.run(resume="auto")
    mine, theirs = rest.weights, whole.weights
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert rest.notes.logged[3]["reward/dropped_groups"] == whole.notes.logged[3]["reward/dropped_groups"] > 0


def test_a_failure_in_training_saves_no_half_trained_weights(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=3)
    failing(run, "stack", "train", lambda number: number == 2)
    with pytest.raises(WorkerError):
        run.trainer.run()
    assert not (tmp_path / "checkpoints").exists()


def test_a_last_evaluation_that_failed_is_made_up_for(tmp_path: Path):
    options: dict[str, Any] = {"num_rollouts": 2, "evaluation": {"num_samples": 5}}
    whole = Run(tmp_path / "whole", **options).trainer.run()
    broken = Run(tmp_path / "parts", **options)
    failing(broken, "engine", "generate", lambda number: number == 4)
    with pytest.raises(WorkerError):
        broken.trainer.run()
    assert broken.notes.logged[2]["train/grad_norm"] > 0
    rest = Run(tmp_path / "parts", **options)
    assert rest.trainer.run(resume="auto")["eval_after"] == whole["eval_after"]
    assert len(rest.requests) == 1


def test_values_of_a_track_are_attached_where_its_samples_lie():
    root = RolloutTrack(sample_ids=["a", "b", "c", "d"])
    grown = ["a/i0", "a/i1", "b/i0", "d/i0"]  # the first worker holds three of them
    child = RolloutTrack(sample_ids=grown, parent_ids=[name[0] for name in grown], parent_track="text")
    with TwoWorkers(lambda context: {}) as runtime:
        held = runtime.hold(RolloutResp(tracks={"text": root, "image": child}))
        held.attach("image", rewards=torch.arange(4.0), advantages=-torch.arange(4.0))
        held.attach("text", advantages=torch.arange(4.0))
        found = held.map(lambda resp: resp.tracks["image"].rewards.tolist())
        assert found == [[0.0, 1.0, 2.0], [3.0]]
        assert held.map(lambda resp: resp.tracks["text"].advantages.tolist()) == [[0.0, 1.0], [2.0, 3.0]]
        attached = held.meta.tracks["image"]
        assert attached.sample_ids == grown and attached.advantages is not None
        assert torch.equal(attached.advantages, -torch.arange(4.0))
        with pytest.raises(ContractError, match=r"track image holds 4 samples, .* {'rewards': 3}"):
            held.attach("image", rewards=torch.zeros(3))
        with pytest.raises(ContractError, match="there is no track 'video'; this response has"):
            held.attach("video", rewards=torch.zeros(3))


def test_no_response_reaches_the_driver_when_groups_are_replaced_selected_and_dealt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise AssertionError("a whole response came to the driver, or left it")

    monkeypatch.setattr(Held, "fetch", refuse)
    monkeypatch.setattr(TwoWorkers, "hold", refuse)
    run = Run(
        tmp_path,
        runtime=TwoWorkers,
        selection=SampleSelection(dynamic_sampling=True, best_of=4),
        same=lambda group: group == "prompt:1",
        media_interval=1,
        evaluation={},
    )
    metrics = run.trainer.step(0)
    assert metrics["reward/dropped_groups"] > 0 and metrics["group/trained_samples"] == 16
    assert run.runtime.num_held() == 0


@pytest.mark.parametrize(
    "selection", [SampleSelection(), SampleSelection(best_of=4)], ids=["all samples", "best and worst"]
)
def test_samples_are_dealt_to_devices_by_their_tokens_with_their_advantages(tmp_path: Path, selection: SampleSelection):
    given = {}
    for balance_tokens in (False, True):
        run = Run(
            tmp_path / str(balance_tokens),
            runtime=TwoWorkers,
            balance_tokens=balance_tokens,
            selection=selection,
            num_updates=2,
        )
        run.trainer.step(0)
        assert isinstance(run.runtime, TwoWorkers) and run.runtime.num_held() == 0
        given[balance_tokens] = [vars(worker.component("stack"))["given"][0] for worker in run.runtime.workers]

    def by_sample(shards: list[RolloutResp]) -> dict[str, tuple[float, list[int], int]]:
        """Advantage, tokens and update of each sample."""
        found = {}
        for resp in shards:
            track = resp.tracks["text"]
            assert isinstance(track.segment, TextSegment) and track.advantages is not None
            tokens = [each.tolist() for each in track.segment.unpack("tokens")]
            for row, name in enumerate(track.sample_ids):
                found[name] = (float(track.advantages[row]), tokens[row], row % 2)
        return found

    def spread(shards: list[RolloutResp]) -> int:
        counts = [[sum(count_tokens(resp, "text")[update::2]) for resp in shards] for update in range(2)]
        return max(max(each) - min(each) for each in counts)

    assert by_sample(given[True]) == by_sample(given[False])
    assert len(by_sample(given[True])) == (16 if selection.best_of else 32)
    assert spread(given[True]) <= 1 < spread(given[False])
