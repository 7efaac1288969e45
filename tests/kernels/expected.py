"""What is known to spill, and why it may."""

from compiling import Launch

from megalite.kernels import flash_attention

WIDEST_IN_REGISTERS = 8192


def known_spill(launch: Launch) -> bool:
    """A norm's program holds a whole row; beyond 8192 columns no number of warps gives each thread few enough.
    Attention's tiles for 9.0 are those that were fastest on such a card, spilling or not (docs/performance.md). Its
    forward with dropout spills 16 bytes on 12.0, beside the hash of every score."""
    if launch.name in ("flash_attention.forward", "flash_attention.backward_kv"):
        table = flash_attention.FORWARD if launch.name.endswith("forward") else flash_attention.BACKWARD_KV
        tile = (launch.constants["ROWS"], launch.columns)
        dropout = launch.constants["THRESHOLD"] > 0 and launch.name.endswith("forward")
        return tile == table["wgmma"][:2] or (dropout and tile == table["mma"][:2])
    norm = launch.name in ("rms_norm.backward", "layer_norm.backward", "rms_norm.forward", "layer_norm.forward")
    return norm and launch.columns > WIDEST_IN_REGISTERS
