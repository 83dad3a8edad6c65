"""Recipes of the `trainer` command. Folders hold recipes by kind of model; `parts` holds what they compose from."""
