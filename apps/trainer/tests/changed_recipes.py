"""Recipes with a mistake in them."""

import copy


def changed(recipe, changes):
    """A copy with dotted keys set; a value of ... deletes the key."""
    recipe = copy.deepcopy(recipe)
    for key, value in changes.items():
        *path, last = key.split(".")
        node = recipe
        for part in path:
            node = node[part]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return recipe
