"""The layer's operations around the rule, as systems under test: one module per family."""
