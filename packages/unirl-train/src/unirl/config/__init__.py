"""Recipes: composed, checked, and turned into objects.

`schema` defines the keys, `recipes` composes and renders (needs the extra `hydra`), `runs` makes typed runs of recipes,
`check` finds mistakes without importing the named classes (only the rules that they bring), and `instantiation` builds
objects. Only `recipes` and the app import Hydra; workers do not.
"""

from unirl.config.instantiation import instantiate

__all__ = ["instantiate"]
