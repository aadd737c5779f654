"""`python -m gdncheck.cli` is the console script."""

from gdncheck.cli import main

main()
