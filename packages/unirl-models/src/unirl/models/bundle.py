"""What `trainer check` reads of every bundle. It imports no framework."""

from __future__ import annotations

from typing import ClassVar


class Bundle:
    """Base of the bundles. A class that differs from a default sets the attribute to a literal."""

    recipe_rules: ClassVar[str] = "unirl.models.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    reads_media: ClassVar[bool] = False
    """True if the model is conditioned on images or videos of a request besides its text."""
    reads_audio: ClassVar[bool] = False
    """True if it hears the sound of a request besides its text."""
    needs_media: ClassVar[bool] = False
    """True if it makes nothing without them."""
    needed_videos: ClassVar[tuple[str, ...]] = ()
    """Roles of the videos that a prompt must bring."""
    most_images: ClassVar[int | None] = None
    """Images of a prompt that it takes, masks apart; None sets no limit."""
    index_file: ClassVar[str] = "model_index.json"
    """What makes a folder one of this bundle's."""
