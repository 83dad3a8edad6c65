"""Loops over collector, learner and run record besides the synchronous one (`unirl.trainer.base`)."""
