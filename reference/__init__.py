"""What is true: recurrence, chunk form, emulation, conv, gates, norms, domain, bounds. Imports torch only."""
