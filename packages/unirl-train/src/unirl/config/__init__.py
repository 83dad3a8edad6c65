"""Recipes: composed, checked, and turned into objects.

`schema` says which keys there are, `recipes` composes and renders (needs the extra `hydra`), `runs` makes typed runs of
them, `check` finds mistakes without importing what a recipe names but for the rules that its classes bring,
`instantiation` builds objects. Only `recipes` and the app import Hydra; workers do not.
"""

from unirl.config.instantiation import instantiate

__all__ = ["instantiate"]
