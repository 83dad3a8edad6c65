"""Several engines as one: a request passes through them stage by stage."""
