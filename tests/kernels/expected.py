"""What is known to spill, and why it may."""

from __future__ import annotations

from compiling import Launch

WIDEST_IN_REGISTERS = 8192


def known_spill(launch: Launch) -> bool:
    """A norm's program holds a whole row; beyond 8192 columns no number of warps gives each thread few enough."""
    norm = launch.name in ("rms_norm.backward", "layer_norm.backward", "rms_norm.forward", "layer_norm.forward")
    return norm and launch.columns > WIDEST_IN_REGISTERS
