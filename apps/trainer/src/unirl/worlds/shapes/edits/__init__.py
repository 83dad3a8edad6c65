"""The edits world: change one object of a picture of shapes as an instruction says, and nothing else."""
