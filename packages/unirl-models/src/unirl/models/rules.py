"""What a bundle needs: a folder of its own format, or the name of one on the hub. See `unirl.types.recipe`."""

from __future__ import annotations

from pathlib import Path

from unirl.types.hub import is_hub_id
from unirl.types.recipe import Machine, Messages, Part, Run


def model_exists(own: Part, run: Run, machine: Machine) -> Messages:
    """A local model folder is there and has the right format; a hub id is not verified."""
    model = own.node.get("pretrained_model")
    if model is None:
        return
    name, path, index = f"{own.at}.pretrained_model", Path(str(model)).expanduser(), own.ability("index_file")
    if path.is_dir():
        if not (path / index).is_file():
            kind = "diffusers pipeline" if index == "model_index.json" else "model"
            holds = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
            yield (
                f"{name} = {model} is not a {kind} folder: it has no {index} "
                f"(it holds {holds}). Give the folder that save_pretrained wrote."
            )
    elif path.exists():
        yield f"{name} = {model} is a file. Give a model's folder or a hub id such as owner/name."
    elif not is_hub_id(str(model)):
        yield (f"{name} = {model}: no such folder, and not a hub id (owner/name). Set PRETRAINED_MODEL or {name}.")


def sharing_problem(at: str, size: int, heads: int, where: str) -> str:
    """The message for ranks that do not divide attention heads."""
    fitting = [count for count in range(1, heads + 1) if heads % count == 0]
    return f"{at} = {size} does not divide the {heads} attention heads of {where}. Set it to one of {fitting}."


RULES = ()
MACHINE_RULES = (model_exists,)
