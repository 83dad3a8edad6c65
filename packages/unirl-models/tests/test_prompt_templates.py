"""What a model reads around a prompt, against the installed pipelines. HunyuanVideo's is read from diffusers itself."""

import inspect
from typing import Any

import diffusers
import pytest

from unirl.models.hunyuan_image import text as hunyuan_image
from unirl.models.hunyuan_video15 import text as hunyuan_video15
from unirl.models.qwen_image import text as qwen_image
from unirl.models.qwen_image_edit import text as qwen_image_edit
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle, QwenImageEditPlusBundle
from unirl.models.sana import text as sana


def stock(class_name: str) -> Any:
    """A stock pipeline without any component, which sets its templates all the same."""
    pipeline_class: Any = getattr(diffusers, class_name)
    parameters = inspect.signature(pipeline_class.__init__).parameters.items()
    return pipeline_class(**{name: None for name, each in parameters if each.default is each.empty and name != "self"})


def default(function: Any, name: str) -> Any:
    """Default of a keyword."""
    return inspect.signature(function).parameters[name].default


@pytest.mark.parametrize(
    ("class_name", "ours"),
    [
        ("QwenImagePipeline", qwen_image),
        ("QwenImageInpaintPipeline", qwen_image),
        ("QwenImageEditPipeline", qwen_image_edit),
        ("QwenImageEditPlusPipeline", qwen_image_edit),
        ("HunyuanImagePipeline", hunyuan_image),
    ],
)
def test_the_template_is_the_stock_pipelines(class_name: str, ours: Any) -> None:
    pipeline = stock(class_name)
    template, tokens = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
    if class_name == "QwenImageEditPipeline":  # which writes the mark of its one image into the template
        template = template.replace(QwenImageEditBundle.picture_mark, "")
    assert (ours.TEMPLATE, ours.TEMPLATE_TOKENS) == (template, tokens)


def test_a_picture_is_marked_as_in_the_stock_pipeline() -> None:
    pipeline: Any = diffusers.QwenImageEditPlusPipeline
    assert f'"{QwenImageEditPlusBundle.picture_mark}"' in inspect.getsource(pipeline._get_qwen_prompt_embeds)
    assert QwenImageEditBundle.picture_mark in stock("QwenImageEditPipeline").prompt_template_encode


@pytest.mark.parametrize("class_name", ["HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"])
def test_the_system_prompt_is_the_stock_pipelines(class_name: str) -> None:
    encode = getattr(diffusers, class_name)._get_mllm_prompt_embeds
    found = (hunyuan_video15.SYSTEM_PROMPT, hunyuan_video15.TEMPLATE_TOKENS)
    assert found == (default(encode, "system_message"), default(encode, "crop_start"))


def test_the_instruction_before_a_prompt_is_the_stock_pipelines() -> None:
    assert "\n".join(default(diffusers.SanaPipeline.__call__, "complex_human_instruction")) == sana.INSTRUCTION
