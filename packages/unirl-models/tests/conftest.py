"""Fixtures: a tiny SD3 saved as a real folder and loaded through the real code."""

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StableDiffusion3Pipeline folder. Read-only: tests that change files copy it."""
    from .tiny import tiny_sd3

    folder = tmp_path_factory.mktemp("sd3")
    tiny_sd3().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sd3_without_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the T5 encoder."""
    from .tiny import tiny_sd3

    folder = tmp_path_factory.mktemp("sd3_without_t5")
    tiny_sd3(has_t5=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sd3_bundle(sd3_folder: Path) -> Any:  # Any: the import below waits until a test needs it
    """The folder loaded once. Read-only: tests that drop, adapt or change weights load their own."""
    from unirl.models.sd3.bundle import SD3Bundle

    return SD3Bundle(str(sd3_folder))


@pytest.fixture(scope="session")
def reference(sd3_folder: Path) -> Any:  # Any: diffusers types its classes as unions
    """diffusers' own pipeline on the same files. Tests set its scheduler; its weights are read-only."""
    from .tiny import load_reference

    return load_reference(sd3_folder)


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 folder. Read-only: tests that change files copy it."""
    from .tiny_text import qwen3, save_text_model

    return save_text_model(qwen3(), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def qwen3_pipeline(qwen3_folder: Path) -> Any:  # Any: the import below waits until a test needs it
    """The folder loaded once. Read-only: tests that adapt or change weights load their own."""
    from unirl.models.qwen3.bundle import Qwen3Bundle
    from unirl.models.qwen3.pipeline import Qwen3Pipeline

    return Qwen3Pipeline(Qwen3Bundle(str(qwen3_folder)))
