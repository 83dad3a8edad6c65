"""What VeOmniBackend needs of the rest of a recipe and of this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from unirl.types.recipe import Machine, Messages, Part, Run

VEOMNI_VERSION = "0.1.12"
"""The VeOmni that this backend is tested with; its interfaces change between releases."""
INSTALL = (
    f"Install {VEOMNI_VERSION} as docs/guides/veomni.md says (`uv sync --extra veomni` in a clone), or take "
    "unirl.train.backend.fsdp.FSDPBackend"
)


def version_problem() -> str | None:
    """What is wrong with the VeOmni of this environment, with the fix, or None."""
    try:
        found = version("veomni")
    except PackageNotFoundError:
        return f"VeOmni is not installed. {INSTALL}."
    if found != VEOMNI_VERSION:
        return f"VeOmni {found} is installed, but this unirl-train is tested with {VEOMNI_VERSION} alone. {INSTALL}."
    return None


def layers_stay_whole(at: str, size: int) -> str:
    """The message for layers that are divided among ranks."""
    return (
        f"{at}.tp = {size} is not for VeOmniBackend, whose plan does not divide layers. Take "
        "unirl.train.backend.fsdp.FSDPBackend, or set it to 1."
    )


def veomni_is_installed(own: Part, run: Run, machine: Machine) -> Messages:
    """The tested VeOmni is in this environment."""
    problem = version_problem()
    if problem is not None:
        yield f"{own.at}: {problem}"


def base_is_whole(own: Part, run: Run) -> Messages:
    """VeOmni shards weights, and codes are whole on every device."""
    del run
    if (own.get("lora") or {}).get("base"):
        yield (
            f"{own.at}.lora.base: {own.get('lora')['base']} is not for {own.name}. Take "
            "unirl.train.backend.fsdp.FSDPBackend, or set it to null."
        )


def layers_are_whole(own: Part, run: Run) -> Messages:
    """Its plan divides no layers."""
    size = run.policy_of(own).ranks_of_layers
    if size > 1:
        yield layers_stay_whole(f"{own.at}.topology", size)


RULES = (base_is_whole, layers_are_whole)
MACHINE_RULES = (veomni_is_installed,)
