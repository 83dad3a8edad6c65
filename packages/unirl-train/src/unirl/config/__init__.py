"""Recipes: composed, checked, and turned into objects.

`schema` says which keys there are, `recipes` composes and renders (needs the extra `hydra`), `check` and `rules` find
mistakes without importing what a recipe names, `instantiation` builds objects. Only `recipes` and the app import Hydra;
workers do not.
"""

from unirl.config.instantiation import instantiate

__all__ = ["instantiate"]
