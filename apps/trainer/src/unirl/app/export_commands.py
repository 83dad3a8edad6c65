"""Commands that export what a run has trained, for people to copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def exports(command: list[str], trains_lora: Mapping[str, bool]) -> Iterator[tuple[str, list[str]]]:
    """Commands that export each policy that trained, with their labels."""
    for policy, is_lora in trains_lora.items():
        suffix, option = ("", []) if len(trains_lora) == 1 else (f"-{policy}", ["--policy", policy])
        if is_lora:
            yield "export", [*command, "--to", f"exported{suffix}-lora", *option]
        yield "merged" if is_lora else "export", [*command, "--to", f"exported{suffix}", "--merged", *option]
