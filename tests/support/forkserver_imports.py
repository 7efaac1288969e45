"""Modules that the fork server of a test process imports for all ranks, beyond what a run needs.

This saves 0.25 s of CPU time for each rank. Nothing here may import triton, which reads TRITON_INTERPRET at its import:
a rank chooses.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # like pytest

import pytest  # noqa: E402
import simulated_gpu.runs  # noqa: E402

assert simulated_gpu.runs and pytest
assert "triton" not in sys.modules
