"""Relations that need no reference: one file each says what to run; `compare_runs` says whether it held."""
