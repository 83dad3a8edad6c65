"""The edits world: change one object of an image of shapes as an instruction says, and nothing else."""
