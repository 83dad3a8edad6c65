"""Environments and tools that show images, in a module that processes of environments import."""

from unirl.rollout.environments.base import Step
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.environments.tools.base import Tool
from unirl.types.messages import Message, ShownImage

STRIPE = ShownImage(1, 3, bytes(9))


def gray(level, height=1, width=1):
    return ShownImage(height, width, bytes([level] * 3 * height * width))


class Darkroom(TextEnvironment):
    """Shows an image as dark as the first number of a turn, until that is 0; 1 is answered without one, 2 by two, 3 by
    a stripe that no model reads. Tells how dark the images of the prompt are."""

    deterministic = True
    shows_images = True

    def reset(self, task, seed):
        self.dark = [image.pixels[0] for image in task["images"]] if "images" in task else None
        return (Message("user", "2 2", (gray(30), gray(40))),) if task["prompt"] == "3" else ()

    def step(self, action):
        first = int(action.text.split()[0])
        images = {1: (), 2: (gray(20), gray(21)), 3: (STRIPE,)}.get(first, (gray(first),))
        counts = {"dark": float(sum(self.dark or [0]))}
        return Step((Message("tool", str(first), images),), terminated=first == 0, counts=counts)


class Undeclared(Darkroom):
    """Says that it shows none."""

    shows_images = False


class Camera(Tool):
    """A tool that shows."""

    description = "look"
    parameters = {"type": "object"}
    shows_images = True

    def __call__(self, arguments, task):
        return "dark"
