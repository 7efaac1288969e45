"""Python imports this at the start of every process: it plants the breakage that MEGALITE_BREAKAGE names."""

import os

from breakages import BREAKAGES

BREAKAGES[os.environ["MEGALITE_BREAKAGE"]].plant()
