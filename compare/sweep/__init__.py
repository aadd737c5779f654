"""The sweep: which configuration first gives a non-finite or a wrong result."""
