"""The layers of a model as data: what models, planner, checkpoints and converters know about a single layer."""

from dataclasses import dataclass, replace

from megalite.config.rope_spec import RopeSpec

# The built-in mixers in which a query attends to the keys of earlier positions
ATTENTION_MIXERS = ("attention", "latent_attention")
# The built-in mixers that pass a state of constant size from token to token
RECURRENT_MIXERS = ("gated_delta_net", "kda", "mamba2")

# The auxiliary losses of routers (nn/router.py), and their names in the log
ROUTER_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "router_z_loss",
}


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer, which exchanges values between the tokens of a sample, an MLP, or one after the other.

    Layers with equal specs have equal shapes and costs.

    Attributes:
        mixer: The name of the mixer: one of ATTENTION_MIXERS or RECURRENT_MIXERS, or one of a plugin; None: the layer
            has none.
        mlp: The name of the MLP in models/layers.py: MLPS; None: the layer has none.
        window: The number of keys that a query attends to, including its own; None: all earlier ones.
        rope: The rotary positions of queries and keys; None: they are not rotated.
        cp_comm_type: What a mixer exchanges over cp. Attention: "allgather" (keys and values) or "a2a" (heads), "auto"
            is "allgather". Recurrent mixers: "allgather" (maps of states), "a2a" (heads), or "auto": fewer bytes.
        normalizes_outputs: The outputs of mixer and MLP are normalized, in place of their inputs.
    """

    mixer: str | None
    mlp: str | None
    window: int | None = None
    rope: RopeSpec | None = None
    cp_comm_type: str = "auto"
    normalizes_outputs: bool = False

    def unit_name(self, number: int) -> str:
        """Return the name of the unit of weights that layer `number` is; the halves of a layer are units of their own.

        A unit is gathered, used and freed as a whole with sharded weights.
        """
        if self.mixer is not None and self.mlp is not None:
            return f"layers.{number}"
        return f"layers.{number}.{self.mixer or self.mlp}"

    @property
    def has_attention(self) -> bool:
        return self.mixer in ATTENTION_MIXERS

    @property
    def is_recurrent(self) -> bool:
        return self.mixer in RECURRENT_MIXERS

    def with_parts(self, mixer: str | None, mlp: str | None) -> "LayerSpec":
        """Return the layer with other parts. Only mixers that attend have a window and rotary positions."""
        if mixer is None:
            return LayerSpec(mixer, mlp)
        if mixer in RECURRENT_MIXERS:
            return LayerSpec(mixer, mlp, cp_comm_type=self.cp_comm_type)
        return replace(self, mixer=mixer, mlp=mlp)

    @property
    def has_experts(self) -> bool:
        return self.mlp == "moe"
