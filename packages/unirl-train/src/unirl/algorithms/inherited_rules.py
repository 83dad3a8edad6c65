"""What inherited advantages need of the stages. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def there_is_a_parent(own: Part, run: Run) -> Messages:
    """The track grows from another one."""
    for stage in run.stages:
        if stage.advantages is own and stage.grows_from is None:
            yield (
                f"{own.at}: {own.name} takes the advantages of the track that a stage grows from, and "
                f"{stage.track or 'this one'} grows from none. Set _target_: "
                "unirl.algorithms.advantages.AdvantageConfig."
            )


RULES = (there_is_a_parent,)
