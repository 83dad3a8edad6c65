"""README's table of models is the one list of families: it has all of them, and other pages link it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "packages" / "unirl-models" / "src" / "unirl" / "models"
NAMES = {
    "anyflow": "AnyFlow FAR",
    "bagel": "BAGEL",
    "causal_lm": "any causal language model",
    "cogvideox": "CogVideoX",
    "flux": "FLUX.1",
    "flux2": "FLUX.2 dev",
    "flux2_klein": "FLUX.2 dev and Klein",
    "hunyuan_image": "HunyuanImage 2.1",
    "hunyuan_image3": "HunyuanImage3",
    "hunyuan_video": "HunyuanVideo",
    "hunyuan_video15": "HunyuanVideo and 1.5",
    "janus": "Janus-Pro",
    "ltx2": "LTX-2",
    "ltx23": "LTX-2.3",
    "minimax_h3": "MiniMax-H3",
    "qwen3": "Qwen3 and Qwen3.5 dense",
    "qwen3_5": "Qwen3.5",
    "qwen3_omni": "Qwen3-Omni",
    "qwen_image": "Qwen-Image",
    "qwen_image_edit": "Qwen-Image-Edit",
    "qwen_vl": "Qwen2.5-VL",
    "sana": "Sana",
    "sd3": "Stable Diffusion 3",
    "sdxl": "Stable Diffusion XL",
    "wan": "Wan 2.1",
    "z_image": "Z-Image",
}
"""Folder of a family -> its name in the table."""
NUMBERS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen".split()
)
CLAIM = re.compile(
    rf"\b(\d+|{'|'.join(NUMBERS)}) (?:model families|families of models|supported families)", re.IGNORECASE
)


def families() -> list[str]:
    """Every folder of models that has its own bundle, apart from shared bases and the small policies that act."""
    apart = {"diffusers_pipeline", "packed", "action"}
    return sorted({path.parent.name for path in MODELS.glob("*/bundle.py")} - apart)


def rows() -> str:
    section = (ROOT / "README.md").read_text().split("## Models\n")[1].split("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


def test_the_table_has_every_family():
    assert sorted(NAMES) == families()
    assert [name for name in NAMES.values() if name not in rows()] == []


@pytest.mark.parametrize("page", ["docs/faq.md", "docs/guides/own_model.md"])
def test_pages_that_speak_of_supported_models_link_the_table(page):
    assert "README.md#models" in (ROOT / page).read_text()


def test_no_page_counts_the_families_otherwise():
    pages = [path for pattern in ("*.md", "docs/**/*.md", "*/*/README.md") for path in ROOT.glob(pattern)]
    claims = {path.name: found for path in pages if (found := CLAIM.findall(path.read_text()))}
    right = {str(len(NAMES)), *([NUMBERS[len(NAMES) - 2]] if len(NAMES) - 2 < len(NUMBERS) else [])}
    assert {name: found for name, found in claims.items() if {each.lower() for each in found} - right} == {}


def test_a_wrong_count_is_found():
    assert CLAIM.findall("UniRL has three model families, and 15 families of models") == ["three", "15"]
