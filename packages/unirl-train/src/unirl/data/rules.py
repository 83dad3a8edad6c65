"""What a data source needs: a file whose rows are right, with the answers that scorers compare with.

See `unirl.types.recipe`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unirl.data.datasets import PromptRow, check_dataset_folder, not_readable_as_text, read_numbered_rows
from unirl.data.pairs import read_pairs
from unirl.data.targets import read_targets
from unirl.types.episodes import MOVES
from unirl.types.errors import DataError
from unirl.types.messages import brings_conversation
from unirl.types.recipe import Fault, Machine, Messages, Part, Run

ANSWER_KEY = "answer_key"
"""Keyword of scorers that compare with an answer in the data: the key of a row that holds it; "answer" by default."""

IMAGE_SHOWN = ("image", "condition")
"""Modality and role of what conversations show."""
MEANING = "meaning"
"""Keyword of scorers whose grammar reads a field of the metadata in place of the prompt: its name; None: the prompt."""


def prompts_exist(own: Part, run: Run, machine: Machine) -> Messages:
    """The prompt file is there, not empty, and every row is right. What is there and wrong is a Fault."""
    path = own.node.get("path")
    if path is None:
        return
    place = Path(str(path)).expanduser()
    problem = unreadable(f"{own.at}.path", str(path), machine)
    if problem is not None:
        yield problem
    elif own.ability("reads_prompt_rows"):
        yield from map(Fault, _wrong_rows(own, run, place))


def _wrong_rows(own: Part, run: Run, place: Path) -> Messages:
    path = own.node["path"]
    try:
        if place.is_dir():
            check_dataset_folder(place)  # its rows take a library that a check does without
            return
        if own.ability("brings_targets"):
            numbered = [(row.prompt_id, row) for row in _read_targets(own, run, place)]
        elif own.ability("brings_images"):
            numbered = [(row.prompt_id, row) for row in _read_pairs(own, run, place)]
        else:
            numbered = read_numbered_rows(place)
    except DataError as error:
        yield f"{own.at}.path: {error}"
        return
    rows = [row for _, row in numbered]
    yield from rows_without_conversations(f"{own.at}.path", str(path), rows, run)
    yield from conversations_are_seen(f"{own.at}.path", str(path), rows, run)
    yield from rows_without_moves(f"{own.at}.path", str(path), rows, run)
    yield from prompts_outside_a_grammar(f"{own.at}.path", str(path), numbered, run)
    yield from rows_without_answers(f"{own.at}.path", str(path), rows, run)
    yield from media_reaches_the_model(f"{own.at}.path", str(path), rows, run)


def unreadable(name: str, path: str, machine: Machine) -> str | None:
    """What is wrong with a file or folder of prompts before it is read, a Fault if it is there; None where nothing
    is."""
    place = Path(path).expanduser()
    if not place.exists():
        command = machine.command_for(path)
        made = f"Make it with: {command}, or set {name}." if command is not None else f"Set {name}."
        return f"{name} = {path}: no such prompt file or dataset folder. {made}"
    if not place.is_dir() and (problem := not_readable_as_text(place)) is not None:
        return Fault(f"{name} = {path} {problem}")
    if place.is_file() and place.stat().st_size == 0:
        return Fault(f"{name} = {path} is empty. Write at least one prompt.")
    return None


def rows_without_conversations(name: str, path: str, rows: Sequence[PromptRow], run: Run) -> Messages:
    """Every row brings what an engine that samples nothing returns."""
    if not run.engine.ability("needs_texts"):
        return
    without = [row.prompt_id for row in rows if not brings_conversation(row.metadata)]
    if without:
        yield (
            f"{name} = {path}: {len(without)} rows ({', '.join(without[:4])}) bring no conversation, which "
            f"{run.engine.name} trains on. Give each `messages` ({{role, content}}, the last one of the assistant), or "
            "`prompt` and `completion`; or choose an engine that samples."
        )


def conversations_are_seen(name: str, path: str, rows: Sequence[PromptRow], run: Run) -> Messages:
    """What conversations show are images, and the model reads them there."""
    if not run.engine.ability("needs_texts"):
        return
    given = [row for row in rows if brings_conversation(row.metadata)]
    others = [row.prompt_id for row in given if any((ref.modality, ref.role) != IMAGE_SHOWN for ref in row.media)]
    if others:
        yield (
            f"{name} = {path}: {len(others)} conversations ({', '.join(others[:4])}) bring media other than images. "
            "Take them out."
        )
    bundle = run.policy.bundle
    shown = [row.prompt_id for row in given if row.media]
    if shown and bundle.ability("reads_media") and not bundle.ability("reads_images_in_turns"):
        yield (
            f"{name} = {path}: {len(shown)} conversations ({', '.join(shown[:4])}) show images, and {bundle.at} "
            f"{bundle.name} reads none there (reads_images_in_turns). Take a model that does (Qwen2.5-VL, Qwen3-VL, "
            "Qwen3.5), or take the images out."
        )


def rows_without_moves(name: str, path: str, rows: Sequence[PromptRow], run: Run) -> Messages:
    """Every row brings the moves that an engine of demonstrations plays."""
    if not run.engine.ability("needs_moves"):
        return
    without = [row.prompt_id for row in rows if not row.metadata.get(MOVES)]
    if without:
        yield (
            f"{name} = {path}: {len(without)} rows ({', '.join(without[:4])}) bring no metadata.{MOVES}, which "
            f"{run.engine.name} trains on. Give each `seed` and `{MOVES}`, or choose an engine that acts."
        )


def rows_without_answers(name: str, path: str, rows: Sequence[PromptRow], run: Run) -> Messages:
    """Every row has the answer that a scorer compares with; without it the run would stop when the row's turn comes."""
    for scorer, part in run.reward.inside("scorers").items():
        if ANSWER_KEY not in part.keywords:
            continue
        key = str(part.get(ANSWER_KEY, "answer"))
        without = [row.prompt_id for row in rows if row.metadata.get(key) in (None, "")]
        if without:
            yield (
                f"{name} = {path}: {len(without)} rows ({', '.join(without[:4])}) have no {key!r}, which scorer "
                f"{scorer} compares with. Add it, or name the right key as reward.scorers.{scorer}.{ANSWER_KEY}."
            )


def prompts_outside_a_grammar(name: str, path: str, rows: Sequence[tuple[str, PromptRow]], run: Run) -> Messages:
    """Every prompt is one that the scorers can judge. rows: each with its place in the file."""
    for scorer, part in run.reward.inside("scorers").items():
        grammar = part.ability("prompt_grammar")
        # A check imports no user code, so the grammar of a user's own scorer is not asked.
        if grammar is None or not str(grammar).startswith("unirl."):
            continue
        module, _, function = str(grammar).rpartition(".")
        parse = getattr(importlib.import_module(module), function)
        meaning = part.get(MEANING)
        wrong: list[tuple[str, str]] = []
        for place, row in rows:
            asked = row.prompt if meaning is None else row.metadata.get(meaning)
            if not isinstance(asked, str):
                wrong.append((place, f"metadata.{meaning}, which it reads, is {asked!r}"))
                continue
            try:
                parse(asked)
            except ValueError as error:
                wrong.append((place, str(error)))
        if wrong:
            places = ", ".join(place for place, _ in wrong[:4])
            yield (
                f"{name} = {path}: scorer {scorer} cannot judge {len(wrong)} of {len(rows)} prompts ({places}): "
                f"{wrong[0][1]}. Write them as it reads them, or train on another scorer (reward.scorers)."
            )


def media_reaches_the_model(name: str, path: str, rows: Sequence[PromptRow], run: Run) -> Messages:
    """Images and videos of the data are read by the model and passed on by the engine, and there where needed."""
    with_media = [row.prompt_id for row in rows if row.media]
    without = [row.prompt_id for row in rows if not row.media]
    if without and run.policy.bundle.ability("needs_media"):
        yield (
            f"{name} = {path}: {len(without)} rows ({', '.join(without[:4])}) bring no image, which "
            f"{run.policy.bundle.at} {run.policy.bundle.name} begins with. Add one to each, or choose another model."
        )
    if not with_media:
        return
    yield from videos_fit(name, path, rows, run)
    heard = [row.prompt_id for row in rows if any(ref.modality == "audio" for ref in row.media)]
    for part, ability in ((run.policy.bundle, "reads_audio"), (run.engine, "takes_audio")):
        if heard and not part.ability(ability):
            yield (
                f"{name} = {path}: {len(heard)} rows ({', '.join(heard[:4])}) bring a sound, but {part.at} {part.name} "
                f"has none of them reach the model ({ability}). Take the sounds out, or choose another."
            )
    most = run.policy.bundle.ability("most_images")
    crowded = [row.prompt_id for row in rows if most is not None and _num_conditions(row) > most]
    if crowded:
        yield (
            f"{name} = {path}: {len(crowded)} rows ({', '.join(crowded[:4])}) bring more than the {most} images that "
            f"{run.policy.bundle.at} {run.policy.bundle.name} takes. Take some out, or choose another model."
        )
    bundle, some = run.policy.bundle, run.engine.ability("takes_media_of")
    for part, ability in ((bundle, "reads_media"), (run.engine, "takes_media")):
        is_left_out = part is run.engine and some is not None and not set(bundle.class_names) & set(some)
        if is_left_out or not part.ability(ability):
            yield (
                f"{name} = {path}: {len(with_media)} rows ({', '.join(with_media[:4])}) bring images, but {part.at} "
                f"{part.name} has none of them reach the model ({ability}). Take the images out, or choose another."
            )


def videos_fit(name: str, path: str, rows: Sequence[PromptRow], run: Run) -> Messages:
    """Rows bring the videos that the model follows, as long as those that are sampled."""
    bundle, sampled = run.policy.bundle, run.sampling.get("num_frames", 1)
    videos = {row.prompt_id: _num_frames(row) for row in rows}
    for role in bundle.ability("needed_videos"):
        lacking = [prompt_id for prompt_id, found in videos.items() if role not in found]
        if lacking:
            yield (
                f"{name} = {path}: {len(lacking)} rows ({', '.join(lacking[:4])}) bring no video of the role {role}, "
                f"which {bundle.at} {bundle.name} follows. Add one to each, or choose another model."
            )
    others = [
        f"{prompt_id} ({role}: {count})"
        for prompt_id, found in videos.items()
        for role, count in found.items()
        if count != sampled
    ]
    if others:
        yield (
            f"{name} = {path}: {len(others)} videos have other numbers of frames than sampling.num_frames = "
            f"{sampled}: {', '.join(others[:4])}. Cut them, or set sampling.num_frames."
        )


def _num_conditions(row: PromptRow) -> int:
    return sum((ref.modality, ref.role) == ("image", "condition") for ref in row.media)


def _num_frames(row: PromptRow) -> dict[str, int]:
    """Number of frames of a row's videos, by role."""
    return dict(Counter(ref.role for ref in row.media if ref.modality == "video"))


def _read_targets(own: Part, run: Run, path: Path) -> list[PromptRow]:
    """The rows of a file of targets, checked against the recipe's size."""
    size = (run.sampling.get("height"), run.sampling.get("width"))
    return read_targets(path, size=size, num_frames=run.sampling.get("num_frames", 1))


def _read_pairs(own: Part, run: Run, path: Path) -> list[PromptRow]:
    """The rows of a file of preferences with their images, checked against the recipe's size."""
    size = (run.sampling.get("height"), run.sampling.get("width"))
    return read_pairs(path, size=size, num_images=max(2, run.sampling.get("samples_per_prompt", 2)))


MACHINE_RULES = (prompts_exist,)
RULES = ()
