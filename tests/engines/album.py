"""An environment that shows images, in a module that processes of environments import."""

from unirl.rollout.environments.base import Step
from unirl.rollout.environments.text import TextEnvironment
from unirl.types.messages import Message


class Album(TextEnvironment):
    """Answers the first turn with an image, the second with two and a text; the third ends the episode."""

    deterministic = True
    shows_images = True

    def __init__(self, pages):
        self.pages = tuple(pages)

    def reset(self, task, seed):
        self.turn = 0
        return ()

    def step(self, action):
        self.turn += 1
        messages = {1: (Message("user", "", self.pages[:1]),), 2: (Message("user", "and now?", self.pages[1:]),)}
        return Step(messages.get(self.turn, ()), terminated=self.turn == 3)
