"""`trainer rehearse`: a step of a recipe at true size, as one rank of its true world, with no GPU and no weights."""
