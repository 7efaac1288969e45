"""Draws the packages and their imports: `python tests/support/draw_packages.py > docs/packages.svg`.

A box is a package, a row a layer; a dark arrow is an import that no chain of others implies.
"""

import sys
from pathlib import Path

import style_rules

LEFT, WIDTH, BOX_W, BOX_H, LAYER_H, TOP = 60, 1000, 172, 46, 84, 88  # LEFT: of the numbers of layers
TITLE = "The packages of megalite and their imports"
KEY = (  # colour, width, meaning
    ("#2f6bb3", 1.8, "import that no chain of other imports implies"),
    ("#c4ccd6", 1.0, "import that is implied by a chain of blue arrows"),
)
BESIDE = {"training": 234, "interop": -234, "nn": 234}  # of the middle: so fewest dark arrows pass behind a box
HOLDS = {
    "generate": "text generation",
    "training": "setup, loop, step, logging",
    "planning": "layout, memory, time",
    "interop": "Hugging Face, Megatron-LM",
    "pipeline": "schedules, executor",
    "optim": "optimizers, ZeRO",
    "data": "tokenizers, samples",
    "checkpoint": "save, load, storage",
    "models": "GPT, model families",
    "nn": "layers with collectives",
    "parallel": "mesh, collectives, specs",
    "kernels": "torch and Triton",
    "launch": "ranks, rendezvous",
    "config": "options, command line",
    "common": "files, console, fault injection",
}


def imports(root: Path) -> dict[str, set[str]]:
    """room -> the other rooms that its modules import."""
    rooms: dict[str, set[str]] = {}
    for module, others in style_rules.graph(root).items():
        if (parts := module.split("."))[2:]:  # not the command, megalite/__main__.py, which is in none
            rooms.setdefault(parts[1], set()).update(other.split(".")[1] for other in others if "." in other)
    return {room: others - {room} for room, others in rooms.items()}


def implied(room: str, other: str, edges: dict[str, set[str]]) -> bool:
    """Whether a longer way leads from `room` to `other`."""
    seen, todo = set[str](), list(edges[room] - {other})
    while todo:
        if (at := todo.pop()) not in seen:
            seen.add(at)
            todo += edges.get(at, ())
    return other in seen


def places() -> dict[str, tuple[float, float]]:
    """room -> middle of its box."""
    return {
        room: (LEFT + (WIDTH - LEFT) * (i + 0.5) / len(rooms) + BESIDE.get(room, 0), TOP + LAYER_H * row + BOX_H / 2)
        for row, rooms in enumerate(style_rules.LAYERS)
        for i, room in enumerate(rooms)
    }


def draw(root: Path) -> str:
    edges, where = imports(root), places()
    pale, dark = [], []
    for room, others in sorted(edges.items()):
        for other in sorted(others):
            (x0, y0), (x1, y1) = where[room], where[other]
            y0, y1 = y0 + BOX_H / 2, y1 - BOX_H / 2 - 3
            bend = (y1 - y0) * 0.45
            path = f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}"
            stays = not implied(room, other, edges)
            colour, width = ("#2f6bb3", 1.8) if stays else ("#c4ccd6", 1.0)
            tip = f'<path d="M{x1 - 4:.0f},{y1 - 4:.0f} L{x1 + 4:.0f},{y1 - 4:.0f} L{x1:.0f},{y1 + 3:.0f} Z"'
            line = f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
            (dark if stays else pale).append(f'{line}{tip} fill="{colour}"/>')
    boxes = []
    for room, (x, y) in where.items():
        corner = f'x="{x - BOX_W / 2:.0f}" y="{y - BOX_H / 2:.0f}"'
        boxes.append(
            f'<rect {corner} width="{BOX_W}" height="{BOX_H}" rx="5" fill="#f7f9fb" stroke="#44546a"/>'
            f'<text x="{x:.0f}" y="{y - 3:.0f}" font-weight="bold" font-size="14">{room}</text>'
            f'<text x="{x:.0f}" y="{y + 14:.0f}" font-size="11" fill="#5a6675">{HOLDS[room]}</text>'
        )
    height = TOP + LAYER_H * (len(style_rules.LAYERS) - 1) + BOX_H + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    style = ' font-family="Helvetica, Arial, sans-serif" text-anchor="middle" fill="#1d2733">'
    back = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head + style, back, *legend(), *pale, *dark, *boxes, "</svg>", ""])


def legend() -> list[str]:
    """The title, what the arrows mean, and the number of each layer."""
    lines = [f'<text x="12" y="24" text-anchor="start" font-weight="bold" font-size="16">{TITLE}</text>']
    for row, (colour, width, meaning) in enumerate(KEY):
        y = 44 + 18 * row
        lines.append(f'<path d="M12,{y} H44" stroke="{colour}" stroke-width="{width}"/>')
        lines.append(f'<path d="M44,{y - 4} L52,{y} L44,{y + 4} Z" fill="{colour}"/>')
        lines.append(f'<text x="60" y="{y + 4}" text-anchor="start" font-size="12">{meaning}</text>')
    lines.append(f'<text x="12" y="{TOP - 4}" text-anchor="start" font-size="12" fill="#5a6675">layer</text>')
    for row in range(len(style_rules.LAYERS)):
        y, number = TOP + LAYER_H * row + BOX_H / 2, len(style_rules.LAYERS) - 1 - row
        lines.append(f'<path d="M{LEFT - 20},{y:.0f} H{WIDTH - 8}" stroke="#eef1f4" stroke-width="{BOX_H}"/>')
        lines.append(f'<text x="26" y="{y + 5:.0f}" font-size="14" fill="#5a6675">{number}</text>')
    return lines


if __name__ == "__main__":
    sys.stdout.write(draw(style_rules.ROOT))
