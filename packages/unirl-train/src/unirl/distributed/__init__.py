"""Runtimes: the same components in one process or on many Ray workers. The only code that imports ray."""
