"""Puts this folder where workers and tests find the planted convolutions by name."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
