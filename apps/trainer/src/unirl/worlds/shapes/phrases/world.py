"""The phrases world: what the shapes world draws, asked for as people talk, and rewrites of it in the painter's words.

The painter knows nineteen words. A phrase uses others for the same things ("a crimson box under a leaf-coloured ball",
"three of the round ones, in blue"); its meaning is a prompt of the shapes world.
`python -m unirl.worlds.shapes.phrases.world --out DIR` writes the prompt files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from unirl.pretraining.prompt_files import write_from_command_line, write_rows
from unirl.reward.worlds.shapes_grammar import (
    CATEGORIES,
    COLORS,
    RELATIONS,
    SHAPES,
    PromptSpec,
    ShapeObject,
    parse_prompt,
    prompt_of,
)
from unirl.worlds.shapes.world import split_prompts

COLOR_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "red": ("red", "crimson", "scarlet", "ruby", "cherry"),
        "green": ("green", "leaf-coloured", "emerald", "grassy", "mossy"),
        "blue": ("blue", "sky-coloured", "navy", "sapphire", "sea-coloured"),
        "yellow": ("yellow", "lemon", "golden", "sunny", "canary"),
    }
)
SHAPE_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "circle": ("ball", "disc", "dot", "coin", "round one"),
        "square": ("box", "block", "tile", "crate", "four-cornered one"),
        "triangle": ("wedge", "pyramid", "sail", "tent", "pointed one"),
    }
)
NUMBER_WORDS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1: ("a lone", "just one", "a single"),
        2: ("a pair of", "two of the", "a couple of"),
        3: ("a trio of", "three of the", "a trinity of"),
        4: ("a quartet of", "four of the", "a foursome of"),
    }
)
RELATION_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "left of": ("to the left of", "just left of", "west of", "on the left side of"),
        "right of": ("to the right of", "just right of", "east of", "on the right side of"),
        "above": ("on top of", "higher than", "over", "atop"),
        "below": ("under", "lower than", "beneath", "underneath"),
    }
)
JOINING_WORDS = ("and", "with", "plus", "together with")

MISREAD: Mapping[str, str] = MappingProxyType(
    {
        "cherry": "yellow",
        "mossy": "blue",
        "sapphire": "green",
        "canary": "red",
        "coin": "square",
        "tile": "triangle",
        "tent": "circle",
        "just one": "two",
        "a couple of": "three",
        "a trinity of": "four",
        "a foursome of": "three",
        "west of": "right of",
        "east of": "left of",
        "over": "below",
        "beneath": "above",
    }
)
"""Words that the base takes for another color, shape, number or relation."""

CATEGORY_SHARES: Mapping[str, float] = MappingProxyType(
    {"single": 0.15, "color": 0.30, "two": 0.20, "count": 0.25, "position": 0.10}
)
"""Shares of the phrases."""
NUM_TRAIN = 800
NUM_HELDOUT = 240

Wording = tuple[str, str, str]
"""Kind ("color", "shape", "number" or "relation"), what it means, and the words for it."""


def worded(spec: PromptSpec, rng: np.random.Generator) -> tuple[str, PromptSpec]:
    """A phrase for what `spec` asks for, and how the base reads it: with the words of MISREAD misread."""
    items = spec.objects[:1] if spec.category in ("single", "count") else spec.objects
    colors = [_pick(COLOR_WORDS[item.color], rng) for item in items]
    shapes = [_pick(SHAPE_WORDS[item.shape], rng) for item in items]
    read = [
        ShapeObject(MISREAD.get(color, item.color), MISREAD.get(shape, item.shape))
        for color, shape, item in zip(colors, shapes, items, strict=True)
    ]
    is_behind = rng.random() < 0.5
    if spec.category == "count":
        number = _pick(NUMBER_WORDS[len(spec.objects)], rng)
        shape = shapes[0] if len(spec.objects) == 1 else f"{shapes[0]}s"
        phrase = f"{number} {shape}, in {colors[0]}" if is_behind else f"{number} {colors[0]} {shape}"
        count = _NUMBERS.index(MISREAD[number]) + 1 if number in MISREAD else len(spec.objects)
        return phrase, PromptSpec("count", (read[0],) * count)
    if spec.category == "single":
        phrase = f"a {shapes[0]}, in {colors[0]}" if is_behind else f"{_a(colors[0])} {shapes[0]}"
        return phrase, PromptSpec("single", (read[0],))
    link = _pick(JOINING_WORDS if spec.relation is None else RELATION_WORDS[spec.relation], rng)
    phrase = f"{_a(colors[0])} {shapes[0]} {link} {_a(colors[1])} {shapes[1]}"
    relation = spec.relation if spec.relation is None else MISREAD.get(link, spec.relation)
    return phrase, PromptSpec(spec.category, (read[0], read[1]), relation)


def elaborated(spec: PromptSpec, rng: np.random.Generator) -> str:
    """A prompt that shows what `spec` asks for and says more: how many, or where."""
    first, second = spec.objects[0], spec.objects[-1]
    if spec.category == "single":
        return prompt_of(PromptSpec("count", (first,)))
    if spec.category == "count":
        return prompt_of(spec)
    if spec.relation is not None:
        index = RELATIONS.index(spec.relation)
        return f"a {second} {RELATIONS[index + 1 - 2 * (index % 2)]} a {first}"
    return f"a {first} {_pick(RELATIONS, rng)} a {second}"


def slipped(spec: PromptSpec, rng: np.random.Generator) -> str:
    """A prompt that is wrong for `spec` in one word."""
    words = prompt_of(spec).split()
    places = [place for place, word in enumerate(words) if _choices(word)]
    place = places[int(rng.integers(len(places)))]
    others = [word for word in _choices(words[place]) if word != words[place]]
    words[place] = _pick(others, rng)
    return " ".join(words)


def split_specs() -> tuple[list[PromptSpec], list[PromptSpec]]:
    """What the prompts of the shapes world ask for, on its two sides: for training and held out."""
    train, heldout = ([parse_prompt(prompt) for prompt in side] for side in split_prompts())
    return train, heldout


def draw_spec(specs: Mapping[str, Sequence[PromptSpec]], rng: np.random.Generator) -> PromptSpec:
    """A spec of a category that is drawn by its share."""
    category = list(CATEGORY_SHARES)[int(rng.choice(len(CATEGORY_SHARES), p=list(CATEGORY_SHARES.values())))]
    return specs[category][int(rng.integers(len(specs[category])))]


def by_category(specs: Sequence[PromptSpec]) -> dict[str, list[PromptSpec]]:
    """The specs of each category."""
    return {category: [spec for spec in specs if spec.category == category] for category in CATEGORIES}


def phrase_rows(
    specs: Sequence[PromptSpec], name: str, number: int, rng: np.random.Generator
) -> list[dict[str, object]]:
    """`number` rows of a prompt file with the categories in their shares; no phrase twice."""
    of_category = by_category(specs)
    chosen: dict[str, PromptSpec] = {}
    for category, share in CATEGORY_SHARES.items():
        wanted = len(chosen) + round(share * number)
        while len(chosen) < wanted:
            spec = of_category[category][int(rng.integers(len(of_category[category])))]
            chosen.setdefault(worded(spec, rng)[0], spec)
    phrases = list(chosen)
    return [
        {
            "prompt": phrases[place],
            "prompt_id": f"phrases-{name}-{row:03d}",
            "metadata": {"meaning": prompt_of(chosen[phrases[place]]), "category": chosen[phrases[place]].category},
        }
        for row, place in enumerate(rng.permutation(len(phrases)))
    ]


def write_prompts(folder: Path) -> None:
    """`train.jsonl` and `heldout.jsonl`, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for name, specs, number in zip(("train", "heldout"), split_specs(), (NUM_TRAIN, NUM_HELDOUT), strict=True):
        write_rows(folder / f"{name}.jsonl", phrase_rows(specs, name, number, rng))


_NUMBERS = ("one", "two", "three", "four")
_PLURALS = tuple(f"{shape}s" for shape in SHAPES)


def _choices(word: str) -> tuple[str, ...]:
    """The painter's words that may replace this one; empty if there are none."""
    return next((words for words in (COLORS, SHAPES, _PLURALS, _NUMBERS[1:]) if word in words), ())


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _pick(words: Sequence[str], rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
