"""Start-up: `gdncheck --help` against an empty Python process, in one run.

Target: under 0.3 s, and nothing heavy imported (the test suite asserts the imports, never the time).
"""

from __future__ import annotations

import subprocess
import sys

from record import save, spread, timed

REPEATS = 11


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-P", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    helped = spread(timed(lambda: command("-m", "gdncheck.cli", "--help"), REPEATS))
    empty = spread(timed(lambda: command("-c", "pass"), REPEATS))
    save("start", __file__, {"seconds": {"help": helped, "empty_python": empty}})
    print(f"gdncheck --help: median {helped['median']:.3f} s; an empty Python: {empty['median']:.3f} s")


if __name__ == "__main__":
    main()
