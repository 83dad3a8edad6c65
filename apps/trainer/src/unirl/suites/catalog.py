"""The suites by name."""

from __future__ import annotations

from unirl.config.suggestions import did_you_mean
from unirl.suites.answers import AIME, GEO3K, GPQA, MATH500
from unirl.suites.dpg import DPG
from unirl.suites.geneval import GENEVAL
from unirl.suites.geneval2 import GENEVAL2
from unirl.suites.ocr import OCR
from unirl.suites.preferences import HPDV2, PARTIPROMPTS
from unirl.suites.shapes import SHAPES
from unirl.suites.suite import Suite
from unirl.suites.vbench import VBENCH
from unirl.suites.wise import WISE
from unirl.types.errors import ConfigError

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (GENEVAL, GENEVAL2, DPG, PARTIPROMPTS, WISE, OCR, HPDV2, VBENCH, AIME, MATH500, GPQA, GEO3K, SHAPES)
}


def chosen_suite(name: str) -> Suite:
    """The suite of a name. Raises ConfigError with the nearest names."""
    if name not in SUITES:
        raise ConfigError(f"unknown suite {name!r}. {did_you_mean(name, SUITES)} There are: {', '.join(SUITES)}.")
    return SUITES[name]
