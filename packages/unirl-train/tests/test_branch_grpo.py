"""BranchGRPO: advantages of edges on a tree worked by hand and against loops, and every edge once.

Legend: B samples, N leaves of a tree, D branch points.
"""

from typing import Any

import numpy as np
import pytest
import torch
from diffusion_fakes import displace, rollout, sampling, setup
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transition_cases import close, micro_of, run, segment_of

from unirl.algorithms.branch_grpo import BranchGRPO, edge_advantages, edges
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.types.branching import Branching
from unirl.types.errors import ConfigError, ContractError

LEAVES = 6
TREE: dict[str, Any] = {
    "samples_per_prompt": LEAVES,
    "init_same_noise": True,
    "branch_steps": [0, 2],
    "branch_factors": [3, 2],
}
PARAMS = sampling(**TREE)
BRANCHING = Branching((0, 2), (3, 2))


def branching_of(factors: list[int]) -> Branching:
    return Branching(tuple(range(len(factors))), tuple(factors))


def test_a_tree_worked_by_hand():
    """Leaves 3 1 | 5 7 | 0 2: nodes are worth 2, 6, 1, whose mean is 3 and whose variance is (1 + 9 + 4) / 3."""
    leaves = torch.tensor([3.0, 1.0, 5.0, 7.0, 0.0, 2.0])
    found = edge_advantages(leaves, branching_of([3, 2]), scale="depth")
    above = [value / (14 / 3) ** 0.5 for value in (-1, 3, -2)]
    # The leaves' own mean is 3 and their variance (0 + 4 + 4 + 16 + 9 + 1) / 6.
    below = [value / (34 / 6) ** 0.5 for value in (0, -2, 2, 4, -3, -1)]
    torch.testing.assert_close(found[:, 0], torch.tensor(above).repeat_interleave(2))
    torch.testing.assert_close(found[:, 1], torch.tensor(below))
    plain = edge_advantages(leaves, branching_of([3, 2]), scale="leaves")
    assert plain.tolist() == [[2, 3], [2, 1], [6, 5], [6, 7], [1, 0], [1, 2]]


def by_loops(leaves: np.ndarray, factors: list[int], scale: str) -> np.ndarray:
    """The same by walking every tree from its leaves to its root."""
    size = int(np.prod(factors))
    found = np.zeros((len(leaves), len(factors)))
    for start in range(0, len(leaves), size):
        values = {(len(factors), leaf): float(leaves[start + leaf]) for leaf in range(size)}
        for depth in reversed(range(1, len(factors))):
            factor = factors[depth]
            for node in range(int(np.prod(factors[:depth]))):
                children = [values[depth + 1, node * factor + child] for child in range(factor)]
                values[depth, node] = sum(children) / factor
        for leaf in range(size):
            node = leaf
            for depth in reversed(range(1, len(factors) + 1)):
                level = [value for (at, _), value in values.items() if at == depth]
                value = values[depth, node]
                if scale == "depth":
                    value = (value - np.mean(level)) / (np.std(level) + 1e-8)
                found[start + leaf, depth - 1] = value
                node //= factors[depth - 1]
    return found


shapes = st.lists(st.integers(2, 4), min_size=1, max_size=3)
scales = st.sampled_from(["depth", "leaves"])


@given(shapes, st.integers(1, 3), scales, st.integers(0, 1000))
def test_advantages_equal_those_of_loops_over_nodes(factors, num_trees, scale, seed):
    tree = branching_of(factors)
    leaves = torch.randn(num_trees * tree.num_leaves, generator=torch.Generator().manual_seed(seed))
    found = edge_advantages(leaves, tree, scale=scale)
    # Float32 leaves, float64 sums: a depth of two equal nodes may divide a rounding of 1e-17 by 1e-8.
    np.testing.assert_allclose(found.numpy(), by_loops(leaves.double().numpy(), factors, scale), rtol=2e-6, atol=2e-6)


@given(shapes, scales, st.integers(0, 1000))
def test_trees_know_nothing_of_each_other_and_twigs_may_change_places(factors, scale, seed):
    tree = branching_of(factors)
    size, draw = tree.num_leaves, torch.Generator().manual_seed(seed)
    leaves = torch.randn(3 * size, generator=draw)
    found = edge_advantages(leaves, tree, scale=scale)
    order = torch.randperm(3, generator=draw)
    rows = (order[:, None] * size + torch.arange(size)).flatten()
    assert torch.equal(edge_advantages(leaves[rows], tree, scale=scale), found[rows])
    twigs = torch.arange(3 * size).view(-1, factors[-1]).flip(1).flatten()
    torch.testing.assert_close(edge_advantages(leaves[twigs], tree, scale=scale), found[twigs], rtol=1e-6, atol=1e-6)


@given(shapes, st.floats(0.1, 10), st.floats(-5, 5), st.integers(0, 1000))
def test_by_depth_neither_scale_nor_centre_of_the_leaves_matters(factors, gain, shift, seed):
    tree = branching_of(factors)
    leaves = torch.randn(2 * tree.num_leaves, generator=torch.Generator().manual_seed(seed)).double()
    found = edge_advantages(leaves, tree, scale="depth")
    moved = edge_advantages(leaves * gain + shift, tree, scale="depth")
    torch.testing.assert_close(moved, found, rtol=1e-4, atol=1e-4)  # EPS matters if the deviation is small
    nodes = found.view(2, tree.num_leaves, -1).double()
    torch.testing.assert_close(nodes.mean(1), torch.zeros(2, len(factors)).double(), rtol=0, atol=1e-6)


def test_leaves_that_are_worth_the_same_teach_nothing():
    tree = branching_of([2, 2])
    assert not edge_advantages(torch.zeros(4), tree, scale="depth").any()
    twins = edge_advantages(torch.tensor([1.0, -1.0, -1.0, 1.0]), tree, scale="depth")
    assert twins[:, 0].tolist() == [0, 0, 0, 0] and twins[:, 1].tolist() == pytest.approx([1, -1, -1, 1])


def test_the_edges_of_a_tree_are_listed_once_each():
    first, steps = edges(BRANCHING, [0, 1, 2])
    assert sorted(zip(steps.tolist(), first.tolist(), strict=True)) == [
        *((step, leaf) for step in (0, 1) for leaf in (0, 2, 4)),
        *((2, leaf) for leaf in range(6)),
    ]


@pytest.mark.parametrize("options", [{}, {"rows_per_forward": 5}, {"edge_scale": "leaves", "advantage_clip": 0.5}])
def test_the_loss_is_that_of_all_samples_weighted_by_how_many_share_an_edge(options):
    """Flow-GRPO's rows with the edges' advantages, each divided by the leaves that repeat it."""
    made = setup(BranchGRPO, samples_per_tree=LEAVES, clip_range=0.2, **options)
    track = rollout(made.pipeline, PARAMS).tracks["image"]
    anchor = {"logp": made.algorithm.anchor(micro_of(track))["logp"]}
    displace(made.backend, 0.05)
    micro = micro_of(track, anchor=anchor)
    value, gradients, _ = run(made, micro)
    assert made.algorithm.num_terms(track) == 2 * (3 + 3 + 6)

    segment, tree = segment_of(track), BRANCHING
    sample_R = torch.arange(2 * LEAVES).repeat_interleave(3)
    step_R = torch.tensor([0, 1, 2]).repeat(2 * LEAVES)
    table = edge_advantages(micro.advantages, tree, scale=options.get("edge_scale", "depth"))
    advantage_R = torch.stack(
        [table[sample, tree.depth(step) - 1] for sample, step in zip(sample_R, step_R.tolist(), strict=True)]
    )
    clip = options.get("advantage_clip", 5.0)
    first, steps = edges(tree, segment.sde_indices)
    column = {(int(leaf), int(step)): place for place, (leaf, step) in enumerate(zip(first, steps, strict=True))}
    share_R = torch.tensor([tree.leaves_per_node(tree.depth(step)) for step in step_R.tolist()])
    anchor_R = torch.stack(
        [
            anchor["logp"][sample // LEAVES, column[sample % LEAVES // share * share, step]]
            for sample, step, share in zip(sample_R.tolist(), step_R.tolist(), share_R.tolist(), strict=True)
        ]
    )
    made.backend.zero_grad()
    logp_R = made.pipeline.replay(track.conditions, segment, sample_R, step_R, PARAMS).logp_R
    ratio_R = (logp_R - anchor_R).exp()
    advantage_R = advantage_R.clamp(-clip, clip)
    loss_R = torch.maximum(-advantage_R * ratio_R, -advantage_R * ratio_R.clamp(0.8, 1.2)) / share_R
    (loss_R.sum() / made.algorithm.num_terms(track)).backward()
    assert value == pytest.approx(float(loss_R.detach().sum()) / made.algorithm.num_terms(track), rel=1e-5)
    theirs = {name: p.grad.clone() for name, p in made.backend.parameters.items() if p.grad is not None}
    close(gradients, theirs)


def test_where_nothing_is_shared_it_is_flow_grpo():
    """One branch point at the first stochastic step, by leaves: every sample has its own edges."""
    params = sampling(**{**TREE, "branch_steps": [0], "branch_factors": [LEAVES]})
    made = setup(BranchGRPO, samples_per_tree=LEAVES, edge_scale="leaves", clip_range=0.2)
    plain = setup(DiffusionGRPO, clip_range=0.2)
    track = rollout(made.pipeline, params).tracks["image"]
    mine, theirs = run(made, micro_of(track)), run(plain, micro_of(track))
    assert mine[0] == theirs[0]
    close(mine[1], theirs[1], rtol=0, atol=0)


def test_later_updates_take_ratios_to_the_policy_before_the_first():
    made = setup(BranchGRPO, samples_per_tree=LEAVES, micro=LEAVES, updates=2)
    resp = rollout(made.pipeline, PARAMS, num_prompts=4)
    track = resp.tracks["image"]
    made.stack.train(resp.with_values("image", advantages=_centred(track.batch_size)), progress=0.0)
    assert len(made.backend.gradients) == 2
    assert any(float(gradient.abs().sum()) for gradient in made.backend.gradients[1].values())


def _centred(count: int) -> Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(3)).view(-1, LEAVES)
    return (drawn - drawn.mean(dim=1, keepdim=True)).flatten()


def test_what_is_no_tree_is_refused():
    made = setup(BranchGRPO, samples_per_tree=LEAVES)
    with pytest.raises(ContractError, match="trains on trees of 6 samples, these share steps as None says"):
        made.algorithm.num_terms(rollout(made.pipeline, sampling(samples_per_prompt=LEAVES)).tracks["image"])
    track = rollout(made.pipeline, PARAMS).tracks["image"]
    with pytest.raises(ContractError, match="samples 0 to 5 are no tree of 6 leaves of one prompt"):
        made.algorithm.rows(micro_of(track.select([0, 1, 2, 6, 7, 8])))
    with pytest.raises(ConfigError, match=r"algorithm.step_fraction = 0.5: samples that share a step"):
        setup(BranchGRPO, samples_per_tree=LEAVES, step_fraction=0.5)
    with pytest.raises(ConfigError, match=r"rollout_correction.level: samples share steps"):
        setup(BranchGRPO, samples_per_tree=LEAVES, rollout_correction=RolloutCorrection(level="sequence", upper=1.1))
    with pytest.raises(ConfigError, match=r"edge_scale = 'width' must be one of depth, leaves"):
        setup(BranchGRPO, samples_per_tree=LEAVES, edge_scale="width")
