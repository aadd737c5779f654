"""Decode: how an error grows over thousands of steps, and whether the declared rounding explains it."""
