"""Reads the answers of SGLang's /generate and /weights_checker. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unirl.rollout.engine.served_text.call import Generations
from unirl.types.errors import ContractError, WeightSyncError

CONSTANTS = ("rotary_emb.axis_map",)
"""Name parts of constants that SGLang's checker reports as weights although it computes them and no checkpoint has
them: the axis of each rotary pair in models with time, height and width positions (Qwen2.5-VL, Qwen3-VL)."""


def generations(answer: Any, prompt_lengths: Sequence[int]) -> Generations:  # Any: JSON
    """The completions of an answer, in the order of the prompts.

    prompt_lengths: tokens of each prompt, image tokens included; SGLang must have read as many.
    Raises ContractError if tokens and log-probs disagree or are missing, and WeightSyncError if samples come from
    several policies, or from one that this trainer did not push.
    """
    outputs = answer if isinstance(answer, list) else [answer]
    if len(outputs) != len(prompt_lengths):
        raise ContractError(f"SGLang answered {len(prompt_lengths)} prompts with {len(outputs)} completions")
    tokens: list[list[int]] = []
    log_probs: list[list[float]] = []
    reasons: list[str] = []
    versions: set[str] = set()
    for row, output in enumerate(outputs):
        try:
            meta = output["meta_info"]
            output_ids, reason, version = output["output_ids"], meta["finish_reason"]["type"], meta["weight_version"]
            if reason == "abort" and not output_ids:  # it was still queued: SGLang has not read it
                scored, num_read = (), prompt_lengths[row]
            else:
                scored, num_read = meta["output_token_logprobs"], int(meta["prompt_tokens"])
            ids, values = [int(entry[1]) for entry in scored], [float(entry[0]) for entry in scored]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ContractError(
                f"sample {row} of SGLang's answer lacks what /generate gives with return_logprob "
                f"({type(error).__name__}: {error}); it has {str(output)[:200]}"
            ) from error
        if num_read != prompt_lengths[row]:
            raise ContractError(
                f"prompt {row} has {prompt_lengths[row]} tokens, SGLang read {num_read}: its image processor resizes "
                "otherwise, or it tokenised the prompt again. Leave bundle.min_pixels and max_pixels to the checkpoint "
                "or give the server the same (engine.engine_args.mm-process-config), and start a server of your own "
                "with SGLANG_MM_AVOID_RETOKENIZE=1."
            )
        if ids != output_ids:
            raise ContractError(f"sample {row} has tokens {output_ids[:8]}, but log-probs of {ids[:8]}")
        tokens.append(ids)
        log_probs.append(values)
        reasons.append(reason)
        versions.add(version)
    if len(versions) != 1 or not (version := next(iter(versions))).isdecimal():
        raise WeightSyncError(f"SGLang's samples are of weight versions {sorted(versions)}, not of one push")
    return Generations(int(version), tokens, log_probs, reasons)


def checksums(answer: Any) -> list[dict[str, str]]:  # Any: JSON
    """SGLang's own checksum of every parameter, one mapping per rank. Raises ContractError if /weights_checker did not
    answer with checksums."""
    try:
        ranks = [{str(name): str(value) for name, value in rank["checksums"].items()} for rank in answer["ranks"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            f"SGLang's /weights_checker gave no checksums ({type(error).__name__}: {error}): {str(answer)[:200]}"
        ) from error
    if not all(ranks) or not ranks:
        raise ContractError(f"SGLang's /weights_checker gave checksums of no parameter: {str(answer)[:200]}")
    return ranks


def kept_parameters(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> list[str]:
    """Names of parameters whose checksum did not change on some rank, or that exist only before or after; with several
    ranks, the ranks are listed too."""
    changes = _changes(before, after)
    kept = ((name, ranks) for name, ranks in sorted(changes.items()) if not _is_constant(name) and not all(ranks))
    return [name if len(ranks) == 1 else f"{name} on rank {_numbers_of(ranks)}" for name, ranks in kept]


def changed_constants(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> list[str]:
    """Names of `CONSTANTS` whose checksum changed on some rank, or that exist only before or after."""
    changes = _changes(before, after)
    return sorted(
        name for name, ranks in changes.items() if _is_constant(name) and any(changed is not False for changed in ranks)
    )


def refuse_unproved(ranks: Sequence[dict[str, str]], num_ranks: int) -> None:
    """Raise WeightSyncError if some rank gave no checksums. num_ranks: ranks per copy of the model."""
    if len(ranks) % num_ranks:
        raise WeightSyncError(f"SGLang's model is split over {num_ranks} ranks, of which {len(ranks)} gave checksums")


def num_parameters(ranks: Sequence[dict[str, str]]) -> int:
    """Parameters over all ranks, `CONSTANTS` left out."""
    return sum(not _is_constant(name) for rank in ranks for name in rank)


def _changes(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> dict[str, list[bool | None]]:
    """Name -> for each rank, True if its checksum changed; None if the name exists only before or after."""
    if len(before) != len(after):
        raise ContractError(f"SGLang had {len(before)} ranks before a push and has {len(after)} after it")
    ranks = list(zip(before, after, strict=True))
    return {
        name: [old[name] != new[name] if name in old and name in new else None for old, new in ranks]
        for name in {name for rank in (*before, *after) for name in rank}
    }


def _numbers_of(ranks: Sequence[bool | None]) -> str:
    """Ranks on which a checksum did not change, as text."""
    return ", ".join(str(rank) for rank, changed in enumerate(ranks) if not changed)


def _is_constant(name: str) -> bool:
    return any(constant in name for constant in CONSTANTS)
