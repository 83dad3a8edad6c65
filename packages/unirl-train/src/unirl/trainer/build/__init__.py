"""Builds a trainer from a resolved recipe: worker components, the runtime, and the driver's parts."""
