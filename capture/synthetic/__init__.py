"""Synthetic cases by family: what each draws for keys, values, gates and beta."""
