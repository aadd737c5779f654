"""Where cases come from: the case file, Hugging Face captures, synthetic generators, imports."""
