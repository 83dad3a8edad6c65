"""The physics, the images and the scripted expert of the tabletop, for many tables at once. NumPy alone.

The table is the unit square. A state holds the places of pusher, block and ring; nothing has a speed.
Legend: B tables, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

SIZE = 64
"""Pixels of a side of the image."""
PUSHER, BLOCK, RING = 0.045, 0.07, 0.10
"""Radii, in sides of the table. The block is drawn as a square of about the same area, and is moved as a disc."""
REACH = 0.06
"""Longest way of one move."""
HOME = 0.06
"""Distance of the block from the middle of the ring below which it is home."""
SUBSTEPS = 2
CONTACT = PUSHER + BLOCK
TABLE, RING_COLOUR, BLOCK_COLOUR, PUSHER_COLOUR = (225, 225, 225), (60, 170, 80), (205, 45, 40), (40, 70, 200)

CLEARANCE = 0.17
"""Distance from the block's middle at which the expert goes round it."""
BACK_OFF = 0.12
"""How far behind the block it goes round. Clearly more than `BEHIND`, or it would wait next to the block."""
BEHIND = 0.07
"""Once so far behind the block, the expert goes straight to where it pushes from."""
LINED_UP = (0.09, 0.022)
"""Distance behind the block, and from the line of the push, from which the expert pushes."""

_PIXELS = ((np.arange(SIZE) + 0.5) / SIZE).astype(np.float32)


def start_of(seed: int) -> Array:
    """[3, 2] places of pusher, block and ring that this seed starts with, none of them near another.

    The block lies where it can be pushed in every direction; the ring at least 0.2 away from it.
    """
    rng = np.random.default_rng(seed)
    while True:
        pusher, block, ring = rng.uniform(0.1, 0.9, 2), rng.uniform(0.28, 0.72, 2), rng.uniform(0.15, 0.85, 2)
        if np.linalg.norm(block - ring) > 0.2 and np.linalg.norm(pusher - block) > 0.16:
            return np.stack([pusher, block, ring]).astype(np.float32)


def starts_of(seeds: Sequence[int]) -> Array:
    """[B, 3, 2], see `start_of`."""
    return np.stack([start_of(seed) for seed in seeds])


def moved(state: Array, move: Array) -> Array:
    """States [B, 3, 2] after one move [B, 2] in [-1, 1] each, which is cut to that range.

    Quasi-static: the pusher goes `REACH` times the move in `SUBSTEPS` steps, and a block that it overlaps gives way
    along the line between their middles. At the wall, where the block cannot, the pusher does.
    """
    state = state.copy()
    step = np.float32(REACH / SUBSTEPS) * np.clip(move, -1, 1).astype(np.float32)
    for _ in range(SUBSTEPS):
        pusher = np.clip(state[:, 0] + step, 0.03, 0.97)
        towards, overlap = _contact(pusher, state[:, 1])
        block = np.clip(state[:, 1] + towards * overlap, BLOCK, 1 - BLOCK)
        towards, overlap = _contact(pusher, block)
        state[:, 0], state[:, 1] = pusher - towards * overlap, block
    return state


def _contact(pusher: Array, block: Array) -> tuple[Array, Array]:
    """Direction [B, 2] from pusher to block, and by how much they overlap [B, 1]."""
    line = block - pusher
    distance = np.maximum(np.linalg.norm(line, axis=1, keepdims=True), 1e-6)
    return line / distance, np.maximum(CONTACT - distance, 0)


def is_home(state: Array) -> NDArray[np.bool_]:
    """[B], whether the block lies on the ring."""
    return np.linalg.norm(state[:, 1] - state[:, 2], axis=1) < HOME


def image_of(state: Array) -> NDArray[np.uint8]:
    """[B, 3, H, W]: a green ring, a red square, a blue disc. Coordinates grow to the right and downwards."""
    across = (_PIXELS - state[:, :, 0:1]) ** 2
    down = (_PIXELS - state[:, :, 1:2]) ** 2
    image = np.empty((len(state), SIZE, SIZE, 3), np.uint8)
    image[:] = TABLE

    def disc(part: int, radius: float) -> NDArray[np.bool_]:
        return across[:, part, None, :] + down[:, part, :, None] < radius**2

    image[disc(2, RING)] = RING_COLOUR
    image[disc(2, RING - 0.03)] = TABLE
    half = BLOCK**2 * 0.8
    image[(across[:, 1] < half)[:, None, :] & (down[:, 1] < half)[:, :, None]] = BLOCK_COLOUR
    image[disc(0, PUSHER)] = PUSHER_COLOUR
    return np.ascontiguousarray(image.transpose(0, 3, 1, 2))


def expert_move(state: Array) -> Array:
    """[B, 2] moves of a scripted expert: round the block to its far side, into line with the ring, then push.

    Brings 99 blocks of 100 home within 24 moves, and all within 32.
    """
    pusher, block, ring = state[:, 0], state[:, 1], state[:, 2]
    way = ring - block
    left = np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-6)
    way = way / left
    across = np.stack([-way[:, 1], way[:, 0]], axis=1)
    place = pusher - block
    along = (place * way).sum(axis=1, keepdims=True)
    aside = (place * across).sum(axis=1, keepdims=True)
    around = block + across * np.where(aside >= 0, 1, -1) * CLEARANCE - way * BACK_OFF
    behind = block - way * (CONTACT + 0.012)
    target = np.where(along > -BEHIND, around, behind)
    pushes = (along < -LINED_UP[0]) & (np.abs(aside) < LINED_UP[1])
    target = np.where(pushes, pusher + way * np.minimum(left, REACH) - across * aside, target)
    move = (np.clip(target, 0.035, 0.965) - pusher) / REACH
    return (move / np.maximum(np.linalg.norm(move, axis=1, keepdims=True), 1)).astype(np.float32)
