"""Written words in images, read by RapidOCR: works offline on a CPU."""

from __future__ import annotations

from unirl.suites.suite import Metric, Suite, prepared

OCR = Suite(
    name="ocr",
    what="words, phrases and numbers that prompts quote, read by RapidOCR",
    makes="image",
    prompts=prepared("ocr"),
    samples_per_prompt=1,
    scorers={"ocr": {"_target_": "unirl.reward.local.ocr.rapid_ocr.RapidOCRScorer"}},
    needs="Install what it reads with: pip install 'unirl-trainer[ocr]'.",
    metrics=(Metric("ocr", is_fraction=False),),
    source="Flow-GRPO (arXiv 2505.05470), its reward on prompts of this project",
)
