"""Lineage and credit through everything that a driver does with two stages: against dictionaries of names alone.

A text and its images (writer and painter), or a thought and the image drawn from it, and crops of the images below.
"""

from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.types.rollout import Credit, RolloutResp, RolloutTrack

REDUCED = {"mean": fmean, "max": max, "sum": sum}


@dataclass
class Names:
    """What is known of every sample by its name, whatever happens to tensors."""

    parent: dict[str, str] = field(default_factory=dict)
    score: dict[str, float] = field(default_factory=dict)
    """Scores of images."""
    sharp: dict[str, float] = field(default_factory=dict)

    def credit(self, text: str, how: Credit) -> tuple[float, float]:
        """Reward and component of a text."""
        children = sorted(name for name, parent in self.parent.items() if parent == text and name in self.score)
        if how == "best_of":
            best = max(self.score[name] for name in children)
            first = next(name for name in children if self.score[name] == best)
            return best, self.sharp[first]
        reduced = REDUCED[how]
        return reduced([self.score[name] for name in children]), reduced([self.sharp[name] for name in children])


def made(names: Names, random: Random, prefix: str, num_groups: int) -> RolloutResp:
    """Texts of some prompts, one to three images of each in mixed order, and crops of some images."""
    texts = [(f"{prefix}g{group}:s{k}", f"{prefix}g{group}") for group in range(num_groups) for k in range(2)]
    images = [(f"{text}/i{k}", text) for text, _ in texts for k in range(random.randint(1, 3))]
    random.shuffle(images)
    crops = [(f"{image}/c0", image) for image, _ in images if random.random() < 0.5]
    for name, parent in (*texts, *images, *crops):
        names.parent[name] = parent
    for name, _ in images:
        # Few values, so that there are ties; the components tell tied images apart.
        names.score[name], names.sharp[name] = float(random.randint(-2, 2)), random.random()
    tracks = {
        "text": _track(texts, None),
        "image": _track(
            images,
            "text",
            rewards=torch.tensor([names.score[name] for name, _ in images]),
            component_rewards={"sharp": torch.tensor([names.sharp[name] for name, _ in images])},
        ),
        "crop": _track(crops, "image"),
    }
    return RolloutResp(tracks=tracks)


def _track(samples: list[tuple[str, str]], parent_track: str | None, **fields) -> RolloutTrack:
    return RolloutTrack(
        sample_ids=[name for name, _ in samples],
        parent_ids=[parent for _, parent in samples],
        parent_track=parent_track,
        **fields,
    )


def check(resp: RolloutResp, names: Names, how: Credit | None) -> None:
    """Every sample has its own parent, every text all its images, and its credit where it has been given."""
    for track in resp.tracks.values():
        assert track.group_ids == [names.parent[name] for name in track.sample_ids]
    texts = resp.tracks["text"].sample_ids
    for child, parent in (("image", "text"), ("crop", "image")):
        above = resp.tracks[parent].sample_ids
        wanted = {name for name, own in names.parent.items() if own in above}
        assert set(resp.tracks[child].sample_ids) == wanted and resp.tracks[child].batch_size == len(wanted)
    image = resp.tracks["image"]
    assert image.scored_rewards.tolist() == [names.score[name] for name in image.sample_ids]
    if how is not None:
        text = resp.tracks["text"]
        expected = [names.credit(name, how) for name in texts]
        assert text.scored_rewards.tolist() == pytest.approx([reward for reward, _ in expected], abs=1e-6)
        assert text.component_rewards["sharp"].tolist() == pytest.approx([sharp for _, sharp in expected], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["image", "crop"]), st.randoms(use_true_random=False))
def test_samples_of_one_track_are_chosen_with_what_grew_from_them(track, random):
    names = Names()
    whole = made(names, random, "", 3)
    rows = random.sample(range(whole.tracks[track].batch_size), random.randint(0, whole.tracks[track].batch_size))
    left = whole.select_of(track, rows)
    chosen = {whole.tracks[track].sample_ids[row] for row in rows}
    assert set(left.tracks[track].sample_ids) == chosen
    assert left.tracks["text"].sample_ids == whole.tracks["text"].sample_ids
    if track == "image":
        crops = {name for name in whole.tracks["crop"].sample_ids if names.parent[name] in chosen}
        assert set(left.tracks["crop"].sample_ids) == crops
    else:
        assert left.tracks["image"].sample_ids == whole.tracks["image"].sample_ids
    for each in left.tracks.values():
        assert each.group_ids == [names.parent[name] for name in each.sample_ids]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(get_args(Credit)), st.booleans(), st.integers(2, 4), st.randoms(use_true_random=False))
def test_refills_dropped_groups_and_permutation_keep_every_family_and_its_credit(
    how, is_credited_first, groups, random
):
    names = Names()

    def fresh(prefix: str, count: int) -> RolloutResp:
        resp = made(names, random, prefix, count)
        # Among equal scores the first image by row counts: put rows of one text in the order of their names.
        order = sorted(range(resp.tracks["image"].batch_size), key=lambda row: resp.tracks["image"].sample_ids[row])
        resp = RolloutResp(tracks={**resp.tracks, "image": resp.tracks["image"].select(order)})
        return resp.propagate_rewards("image", "text", how) if is_credited_first else resp

    resp = fresh("", groups)
    check(resp, names, how if is_credited_first else None)
    for refill in range(3):
        text = resp.tracks["text"]
        dropped = set(random.sample(sorted(set(text.group_ids)), random.randint(1, groups - 1)))
        keep = [row for row, group in enumerate(text.group_ids) if group not in dropped]
        more = fresh(f"refill{refill}:", len(dropped))
        resp = RolloutResp.concat([resp.select(keep), more])
        check(resp, names, how if is_credited_first else None)
        order = list(range(resp.batch_size))
        random.shuffle(order)
        resp = resp.select(order)
        check(resp, names, how if is_credited_first else None)
        assert resp.tracks["text"].sample_ids == [
            [*text.select(keep).sample_ids, *more.tracks["text"].sample_ids][row] for row in order
        ]
    cut = random.randrange(1, resp.batch_size)
    shards = [resp.slice(0, cut), resp.slice(cut, resp.batch_size)]
    if not is_credited_first:
        shards = [shard.propagate_rewards("image", "text", how) for shard in shards]
        resp = resp.propagate_rewards("image", "text", how)
    for part in (*shards, *resp.split(), resp, RolloutResp.concat(shards)):
        check(part, names, how)
