"""Small modules that stand in for parts of an engine, so that its kernel folders import without it."""
