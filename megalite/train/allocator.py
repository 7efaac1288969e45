"""The C library's allocator, told that a training step frees what the next one allocates."""

from __future__ import annotations

import ctypes

from megalite.config.environment import variable

# Numbers of glibc's malloc.h, and bytes. Blocks of up to 64 MiB come from the heap, of which half a GiB may stay free;
# larger ones are mapped one by one as before, since holes of their size would add up (alignment keeps a freed block
# from being used by the next one of the same size before glibc 2.38). glibc before 2.35 refuses more than 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
FROM_THE_HEAP, KEPT = (64 << 20, 32 << 20), 512 << 20
VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees: activations on a CPU then lie in pages that it already has.

    By default glibc returns large blocks to the system when they are freed, and every step pays for its pages again
    (docs/performance.md says how much). False where nothing was changed: another C library, or the user's variables.
    """
    if any(map(variable, VARIABLES)):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    for size in FROM_THE_HEAP:
        if mallopt(M_MMAP_THRESHOLD, size) == 1:
            return mallopt(M_TRIM_THRESHOLD, KEPT) == 1
    return False  # the other one alone would fix the threshold of mapping where it is, at 128 KiB
