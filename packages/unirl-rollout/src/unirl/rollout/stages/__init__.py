"""Several engines as one: what a request goes through, stage by stage."""
