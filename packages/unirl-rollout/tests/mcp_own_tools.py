"""A tool of ours that shows an image without a task."""

from unirl.rollout.environments.tools.base import Answer, Tool, one_text
from unirl.types.messages import ShownImage


class Paint(Tool):
    description = "Show a color."
    parameters = one_text("color")
    shows_images = True

    def __init__(self, *, side=2):
        self.side = side

    def __call__(self, arguments, task):
        pixel = bytes.fromhex(arguments["color"])
        return Answer("there", (ShownImage(self.side, self.side, pixel * self.side**2),))
