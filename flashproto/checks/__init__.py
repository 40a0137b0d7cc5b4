"""Argument checks of the public functions: what was passed, what is accepted, one thing to do."""
