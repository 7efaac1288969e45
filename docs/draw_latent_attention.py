"""Draw docs/latent_attention.png: the channels per token of a layer's tensors on one rank, and what is gathered.

python -m docs.draw_latent_attention docs/latent_attention.png
"""

import sys
from pathlib import Path
from typing import Any

from megalite.config.options import build
from megalite.models.families import PRESETS
from tools.plots.style import Picture, color, figure, legend, save, text_color

TP = 8
SHARD, GATHERED_TP, GATHERED_CP, OWN_HEADS = "blue", "vermilion", "orange", "green"
LABELS = {
    SHARD: "tokens of this rank",
    GATHERED_TP: "tokens of all tp ranks",
    GATHERED_CP: "tokens of all cp ranks",
    OWN_HEADS: f"heads of this rank, 1/{TP} of all",
}


def rows(config: Any) -> list[tuple[str, str, list[int]]]:
    """Return (name, color, channels per token of each part) of the tensors of a layer, in their order in forward."""
    model = config.model
    latents = [model.q_lora_rank, model.kv_lora_rank, model.qk_pos_emb_head_dim]
    heads = model.num_attention_heads // TP
    queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    keys, values = heads * model.qk_head_dim, heads * model.v_head_dim
    return [
        ("x", SHARD, [model.hidden_size]),
        ("q_down, kv_down: latents", SHARD, latents),
        ("all-gather over tp", GATHERED_TP, latents),
        ("all-gather over cp", GATHERED_CP, latents[1:]),
        ("q_up: queries", OWN_HEADS, [queries]),
        ("kv_up: keys | values", OWN_HEADS, [keys, values]),
        ("attention", OWN_HEADS, [values]),
        ("out, reduce-scatter over tp", SHARD, [model.hidden_size]),
    ]


def picture() -> Picture:
    """Return the tensors of a layer of DeepSeek-V3 as bars, whose color says which tokens and heads a rank has."""
    config = build(dict(PRESETS["deepseek-v3"]))

    def draw(width: float) -> Any:
        fig, (axis,) = figure(width, [3.6])
        names = []
        labeled = set()
        for index, (name, color_name, parts) in enumerate(rows(config)):
            names.append(name)
            left = 0
            for channels in parts:
                label = None if color_name in labeled else LABELS[color_name]
                labeled.add(color_name)
                axis.barh(index, channels, left=left, color=color(color_name), edgecolor=color("paper"), label=label)
                if channels > 1000:
                    text = f"{channels:,}"
                    x = left + channels / 2
                    axis.text(x, index, text, ha="center", va="center", color=text_color(color_name), fontsize=8)
                left += channels
            if len(parts) > 1:
                axis.text(left + 60, index, f"{left:,}", va="center", color=color("ink"), fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel(f"channels per token, DeepSeek-V3 with tp {TP}")
        axis.grid(False)
        axis.invert_yaxis()
        legend(fig, axis, width)
        return fig

    caption = "The channels per token of a layer's tensors on one rank, by the tokens and heads that it has."
    return Picture("latent_attention", caption, draw)


if __name__ == "__main__":
    save(picture(), Path(sys.argv[1]))
