"""A set made into files: fetched or found, converted, checked, and put in place as a whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.data.datasets import read_rows
from unirl.datasets.captioned import OWN_SUFFIXES
from unirl.datasets.manifest import (
    NAME,
    Manifest,
    checksums,
    pictures_folder,
    read_manifest,
    sha256_of,
    standing,
)
from unirl.datasets.records import (
    DISK_FULL,
    FetchError,
    Files,
    Output,
    PromptSet,
    PublishedFile,
    Repository,
)
from unirl.datasets.writing import write_rows
from unirl.types.errors import DataError


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found or did."""

    folder: Path
    is_new: bool
    """False where every file was there already, as it was made."""
    files: tuple[tuple[str, int], ...]
    """Name and rows of each."""


def prepare(
    prompt_set: PromptSet,
    folder: Path,
    *,
    given: Path | None = None,
    split: str | None = None,
    overwrite: bool = False,
    is_partial: bool = False,
) -> Prepared:
    """Make the files of a set in `folder`, or find them there whole.

    given: a folder or file with what is published, instead of a download; for a set that `takes_own` also a prompt
    file of the user's own images. split: only its file. overwrite: replace
    files that are there and other. is_partial: accept sources that are not the published ones whole.
    Raises DataError if sources are missing (with the commands that fetch them) or wrong, `folder` holds something else,
    or the disk is full; existing files are then not changed.
    """
    outputs = _chosen(prompt_set, split)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file; {prompt_set.name} is a folder of files. Give a folder with --out.")
    manifest = read_manifest(folder)
    standings = {output.file: standing(folder, manifest, prompt_set, output.file) for output in outputs}
    is_whole = all(each == "whole" for each in standings.values())
    is_needed = given is not None or overwrite or prompt_set.is_generated
    if is_whole and manifest and not is_needed and _is_current(manifest, prompt_set, outputs, is_partial):
        return Prepared(folder, False, tuple((output.file, manifest.rows(output.file)) for output in outputs))
    if not overwrite:
        _refuse_foreign(folder, standings)
    with _staging(folder) as staged:
        made = _made(prompt_set, outputs, staged, given, is_partial)
        files = tuple((output.file, made[output.file]["rows"]) for output in outputs)
        known = dict(manifest.files) if manifest and manifest.name == prompt_set.name else {}
        if is_whole and all(known.get(name) == record for name, record in made.items()):
            return Prepared(folder, False, files)
        if not overwrite:
            _refuse_other(folder, standings, known, made)
        _put_in_place(folder, staged, outputs, Manifest(prompt_set.name, {**known, **made}))
    return Prepared(folder, True, files)


def _chosen(prompt_set: PromptSet, split: str | None) -> tuple[Output, ...]:
    if split is None:
        return prompt_set.outputs
    output = prompt_set.output(split)
    if output is None:
        splits = ", ".join(each.split for each in prompt_set.outputs)
        raise DataError(f"{prompt_set.name} has no split {split!r}; it has {splits}. Give one of them with --split.")
    return (output,)


def _is_current(manifest: Manifest, prompt_set: PromptSet, outputs: Sequence[Output], is_partial: bool) -> bool:
    """True if the files were made as they would be today, and from all of their sources."""
    sources = [manifest.files[output.file]["source"] for output in outputs]
    return all(
        source.get("version") == prompt_set.version and (is_partial or not source.get("partial")) for source in sources
    )


def _refuse_foreign(folder: Path, standings: dict[str, Any]) -> None:  # Any: Standing
    for file, each in standings.items():
        if each == "unknown":
            raise DataError(
                f"{folder / file}: is there already (or a folder of its images) and was not made by this command. "
                "Keep it and give another folder with --out, or replace it with --overwrite."
            )
        if each == "changed":
            raise DataError(
                f"{folder / file}: is no longer as it was made (its sha256 is not that of {NAME}). Keep it elsewhere, "
                "then make it again with --overwrite."
            )


def _refuse_other(folder: Path, standings: dict[str, Any], known: dict[str, Any], made: dict[str, Any]) -> None:
    # Any: Standing, and JSON values
    for file, record in made.items():
        if standings[file] == "whole" and known[file] != record:
            is_same = known[file]["sha256"] == record["sha256"]
            what = "comes from another source" if is_same else "has other rows"
            raise DataError(
                f"{folder / file}: what would be made now {what} (see {folder / NAME}). Give another folder with "
                "--out, or replace it with --overwrite."
            )


def _made(
    prompt_set: PromptSet, outputs: Sequence[Output], staged: Path, given: Path | None, is_partial: bool
) -> dict[str, dict[str, Any]]:  # Any: JSON values
    """Write the outputs into `staged`; returns their records."""
    if prompt_set.is_generated:
        if given is not None or is_partial:
            option = "--from" if given is not None else "--partial"
            raise DataError(f"{prompt_set.name} is generated, so {option} means nothing. Leave it out.")
        files, revisions = Files({}, {}), {}
    else:
        files, revisions = _sources(prompt_set, outputs, staged, given, is_partial)
    made: dict[str, dict[str, Any]] = {}
    for output in outputs:
        path = staged / output.file
        num_rows = write_rows(path, output.rows(files))
        read_rows(path)
        source = _source(prompt_set, output, files, revisions)
        made[output.file] = {"rows": num_rows, **checksums(path), "source": source}
    return made


def _source(prompt_set: PromptSet, output: Output, files: Files, revisions: dict[str, str | None]) -> dict[str, Any]:
    """What an output was made from. Any: JSON values."""
    origin: dict[str, Any] = {"version": prompt_set.version}
    if prompt_set.is_generated:
        return origin | {"generated": True}
    if files.own is not None:
        return origin | {"own": sha256_of(files.own)}
    repositories = []
    for repository in prompt_set.sources:
        read = [file.path for file in repository.files if file.path in output.reads]
        if read:
            digests = {path: [sha256_of(each) for each in files.paths[path]] for path in read}
            repositories.append(
                {
                    "address": repository.address,
                    "revision": revisions[repository.name],
                    "license": repository.license,
                    "sha256": {path: found[0] if len(found) == 1 else found for path, found in digests.items()},
                }
            )
    return origin | {"repositories": repositories} | ({"partial": True} if files.is_partial else {})


# Sources ------------------------------------------------------------------------------------------------------------


def _sources(
    prompt_set: PromptSet, outputs: Sequence[Output], staged: Path, given: Path | None, is_partial: bool
) -> tuple[Files, dict[str, str | None]]:
    """The published files that the outputs are made from, and the commit of each repository; None of given files.

    Or a prompt file of the user's own, and no repository.
    """
    if given is not None and prompt_set.takes_own and given.is_file() and given.suffix in OWN_SUFFIXES:
        if is_partial:
            raise DataError(f"--partial is about published files; {given} is your own. Leave it out.")
        return Files({}, {}, own=given), {}
    wanted = {path for output in outputs for path in output.reads}
    by_repository = {
        repository: [file for file in repository.files if file.path in wanted] for repository in prompt_set.sources
    }
    by_repository = {repository: files for repository, files in by_repository.items() if files}
    published = {file.path: file for files in by_repository.values() for file in files}
    if given is not None:
        found = Files(_located(prompt_set, published, given), published, is_partial)
        revisions: dict[str, str | None] = dict.fromkeys((each.name for each in by_repository), None)
    else:
        paths: dict[str, tuple[Path, ...]] = {}
        revisions = {}
        for repository, files in by_repository.items():
            try:
                fetched = repository.fetch(files, staged / "download")
            except FetchError as error:
                raise DataError(_how_to_fetch(prompt_set, by_repository, str(error))) from error
            paths.update(fetched.paths)
            revisions[repository.name] = fetched.revision
        found = Files(paths, published, is_partial)
    if not is_partial:
        _require_checksums(found)
    return found, revisions


def _located(prompt_set: PromptSet, published: dict[str, PublishedFile], given: Path) -> dict[str, tuple[Path, ...]]:
    """The published files in a folder, at their path in the repository or by their name; or the one file itself."""
    if not given.exists():
        raise DataError(f"--from {given}: there is no such file or folder.")
    if given.is_file():
        if len(published) > 1:
            raise DataError(
                f"--from {given}: is one file, but {prompt_set.name} is made from {_listed(published)}. Give the "
                "folder that holds them, or the --split that needs this one alone."
            )
        (path,) = published
        if given.suffix != Path(path).suffix:
            raise DataError(
                f"--from {given}: is no {Path(path).suffix} file; {prompt_set.name} is made from {path}"
                f"{_or_own(prompt_set)}."
            )
        return {path: (given,)}
    found = {path: _in_folder(given, path) for path in published}
    missing = [path for path, files in found.items() if not files]
    if missing:
        raise DataError(
            f"--from {given}: has no {_listed(missing)}, neither at that path nor by that name. Put the published "
            f"files there{_or_own(prompt_set)}."
        )
    for path, files in found.items():
        for file in files:
            if file.is_dir():
                raise DataError(f"--from {given}: {file} is a folder where the file {path} is meant.")
    return found


def _in_folder(folder: Path, path: str) -> tuple[Path, ...]:
    for pattern in (path, path.rsplit("/", 1)[-1]):
        if found := tuple(sorted(folder.glob(pattern))):
            return found
    return ()


def _require_checksums(files: Files) -> None:
    for path, published in files.published.items():
        if published.sha256 is None:
            continue
        for file in files.paths[path]:
            found = sha256_of(file)
            if found != published.sha256:
                raise DataError(
                    f"{file}: is not {path} as it is published (sha256 {found[:12]}..., published "
                    f"{published.sha256[:12]}...). Fetch it again, or accept it with --partial."
                )


def _how_to_fetch(prompt_set: PromptSet, by_repository: dict[Repository, list[PublishedFile]], reason: str) -> str:
    """The message for a machine that cannot download: which files of which repository, and what to type."""
    folder = f"{prompt_set.name}-published"
    lines = [f"{prompt_set.name} cannot be downloaded here: {reason.rstrip('.')}.", "It is made from"]
    for repository, files in by_repository.items():
        lines.append(f"  {_listed([file.path for file in files])}")
        lines.append(f"  of {repository.address} at {repository.revision} (license: {repository.license})")
    lines.append("On a machine with network:")
    for repository, files in by_repository.items():
        lines += [f"  {command}" for command in repository.fetch_commands(files, folder)]
    lines += [
        f"Copy the folder {folder} here, then:",
        f"  uv run trainer data prepare {prompt_set.name} --from {folder}",
    ]
    if prompt_set.takes_own:
        lines += [
            "Or of images of your own, by a prompt file with one image per row (docs/guides/own_data.md):",
            f"  uv run trainer data prepare {prompt_set.name} --from my-pictures/prompts.jsonl",
        ]
    return "\n".join(lines)


def _or_own(prompt_set: PromptSet) -> str:
    if not prompt_set.takes_own:
        return ""
    return f", or give a prompt file ({', '.join(OWN_SUFFIXES)}) that names one image of your own per row"


def _listed(paths: Sequence[str] | dict[str, PublishedFile]) -> str:
    return ", ".join(paths)


# Places -------------------------------------------------------------------------------------------------------------


@contextmanager
def _staging(folder: Path) -> Generator[Path]:
    """A folder inside `folder` to write in; whatever is left of it goes, and with it folders made for it alone.

    Raises DataError if the disk is full.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    staged: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        yield staged
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise DataError(
            f"the disk is full: {folder} could not be made, and nothing half was left. Make room and type the command "
            "again."
        ) from error
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        for each in new:
            try:
                each.rmdir()
            except OSError:  # it holds the set now, or was never made
                break


def _put_in_place(folder: Path, staged: Path, outputs: Sequence[Output], manifest: Manifest) -> None:
    """Move what was made to where it belongs, SOURCE.json last: until then the files count as changed."""
    written = staged / NAME
    written.write_text(manifest.text(), encoding="utf-8")
    for output in outputs:
        made, target = staged / output.file, folder / output.file
        pictures = pictures_folder(made)
        if pictures.is_dir():
            old = pictures_folder(target)
            if old.exists():
                old.replace(staged / f"old-{old.name}")
            pictures.replace(old)
        made.replace(target)
    written.replace(folder / NAME)
