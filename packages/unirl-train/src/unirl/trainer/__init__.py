"""The training loop. `base` has the loop, `build` makes workers and the parts of the driver, `commands` runs, evaluates
and exports recipes."""
