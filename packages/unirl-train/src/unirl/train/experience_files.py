"""Samples of past rollouts on disk, of which some are trained on again: one file per rollout and device."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.distributed.tensor.transport import outgoing
from unirl.train.checkpoint.sample_files import files_of, link_files, saved_files
from unirl.types.errors import CheckpointError
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.storage import load_rollout, save_rollout

EXPERIENCE = "experience"
"""Folder of the files in a run directory, and in a checkpoint."""


@dataclass(frozen=True)
class Taken:
    """Samples of one file."""

    name: str
    """What the rollout was kept as."""
    shard: int
    rows: Sequence[int]


class ExperienceFiles:
    """Keeps the samples that a device trains on, with their advantages and without media, and joins some of them with
    a later rollout.

    folder: of the files, on a file system that all ranks share, as that of `checkpoints`. place: of this rank.
    Every method is called by the driver.
    """

    def __init__(self, folder: Path, checkpoints: Path, place: MeshPlace) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._place = place

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def keep(self, resp: RolloutResp, name: str) -> None:
        """Write this rank's samples; of ranks that share samples, the first one writes. Called on all ranks."""
        place = self._place
        if place.sp_rank == place.tp_rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_rollout(self._file(name, place.dp_rank), _without_media(resp))

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def joined(self, resp: RolloutResp, taken: Sequence[Sequence[Taken]], purpose: str) -> RolloutResp:
        """This rank's samples and behind them those of `taken`, which has a list per data-parallel place. Called on all
        ranks.

        purpose: of the ids of kept samples, which have to be others than those of `resp`, and other draws of noise.
        Raises DataError for a file that is damaged, FileNotFoundError for one that is missing.
        """
        parts = [outgoing(_without_media(resp))]
        read: dict[Path, RolloutResp] = {}
        for each in taken[self._place.dp_rank]:
            path = self._file(each.name, each.shard)
            if path not in read:
                read[path] = load_rollout(path)[0]
            parts.append(_renamed(read[path].select(list(each.rows)), f"{purpose}{each.name}:"))
        return RolloutResp.concat(parts)

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def forget(self, names: Sequence[str]) -> None:
        """Remove what was kept under these names."""
        for name in names:
            for path in files_of(self._folder, name):
                path.unlink()

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def restore(self, step: int, names: Sequence[str]) -> None:
        """Take what the newest checkpoint of `step` has kept under these names instead of what there is. Raises
        CheckpointError if it lacks something."""
        found = saved_files(self._checkpoints, step, EXPERIENCE)
        if names and (found is None or not all(files_of(found, name) for name in names)):
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._checkpoints} lacks samples that it has kept "
                f"({', '.join(names[:3])}). Restore its folder {EXPERIENCE} from a copy, or resume with "
                "schedule.experience: null, which trains on fresh samples alone."
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        if found is not None and names:
            link_files(found, self._folder, names)

    def _file(self, name: str, shard: int) -> Path:
        return self._folder / f"{name}-{shard:05d}.safetensors"


def _without_media(resp: RolloutResp) -> RolloutResp:
    return resp.replace(tracks={name: track.replace(decoded=None) for name, track in resp.tracks.items()})


def _renamed(resp: RolloutResp, prefix: str) -> RolloutResp:
    """The response with a prefix before all ids of samples and groups."""

    def renamed(track: RolloutTrack) -> RolloutTrack:
        parents = None if track.parent_ids is None else [prefix + name for name in track.parent_ids]
        return track.replace(sample_ids=[prefix + name for name in track.sample_ids], parent_ids=parents)

    return resp.replace(tracks={name: renamed(track) for name, track in resp.tracks.items()})
