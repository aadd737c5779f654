"""Generators of fuzz cases, one file each; `table` lists them. See `generator` for how to add one."""
