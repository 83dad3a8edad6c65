"""What a tool of an MCP server answered, as our tools answer."""

from __future__ import annotations

import base64
import io
import json

from mcp import types
from PIL import Image

from unirl.rollout.environments.tools.base import Answer, ToolError, ToolUnavailableError
from unirl.types.messages import ShownImage

MAX_PIXELS = 4096 * 4096


def answer_of(result: types.CallToolResult, *, shows_images: bool) -> Answer:
    """Its texts, a line break between two, and its images if these are shown. What is neither is named by its kind;
    structured content counts where there is nothing else.

    Raises ToolError with the text if the tool says that it failed, ToolUnavailableError for an image that cannot be
    read.
    """
    texts, images = [], []
    for block in result.content:
        match block:
            case types.TextContent(text=text):
                texts.append(text)
            case types.ImageContent(data=data) if shows_images and not result.is_error:
                images.append(_image(data))
            case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
                texts.append(text)
            case types.ResourceLink(name=name, uri=uri):
                texts.append(f"{name}: {uri}")
            case _:
                texts.append(f"({block.type} that is not shown)")
    if not result.content and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or "the tool failed and says nothing")
    return Answer(text, tuple(images))


def _image(data: str) -> ShownImage:
    try:
        opened = Image.open(io.BytesIO(base64.b64decode(data)))
        if opened.width * opened.height > MAX_PIXELS:
            raise ToolUnavailableError(
                f"the tool answered an image of {opened.width} x {opened.height} pixels, more than {MAX_PIXELS}"
            )
        image = opened.convert("RGB")
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ToolUnavailableError("the tool answered an image that cannot be read") from error
    return ShownImage(image.height, image.width, image.tobytes())
