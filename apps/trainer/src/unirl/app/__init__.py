"""The `trainer` command: verbs over recipes."""
