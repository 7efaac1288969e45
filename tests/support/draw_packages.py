"""Draw the packages and their imports: `python tests/support/draw_packages.py > docs/packages.svg`.

A box is a package, a row a layer; a blue arrow is an import that no chain of others implies.
"""

import sys
from pathlib import Path

import style_rules

LEFT, WIDTH, BOX_W, BOX_H, LAYER_H, TOP = 60, 1000, 172, 46, 84, 88  # the numbers of the layers are left of LEFT
TITLE = "The packages of megalite and their imports"
KEY = (  # color, width, meaning
    ("#2f6bb3", 1.8, "import that no chain of other imports implies"),
    ("#c4ccd6", 1.0, "import that is implied by a chain of blue arrows"),
)
OFFSETS = {"training": 234, "interop": -234, "nn": 234}  # from the middle, so that few blue arrows pass behind a box
CONTENTS = {
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
    """Return the other packages that the modules of each package import."""
    packages: dict[str, set[str]] = {}
    for module, others in style_rules.import_graph(root).items():
        if (parts := module.split("."))[2:]:  # not megalite/__main__.py, which is in no package
            packages.setdefault(parts[1], set()).update(other.split(".")[1] for other in others if "." in other)
    return {package: others - {package} for package, others in packages.items()}


def implied(package: str, other: str, edges: dict[str, set[str]]) -> bool:
    """Return whether a longer chain of imports leads from `package` to `other`."""
    seen, todo = set[str](), list(edges[package] - {other})
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += edges.get(current, ())
    return other in seen


def box_centers() -> dict[str, tuple[float, float]]:
    """Return the center of each package's box."""
    return {
        package: (
            LEFT + (WIDTH - LEFT) * (i + 0.5) / len(packages) + OFFSETS.get(package, 0),
            TOP + LAYER_H * row + BOX_H / 2,
        )
        for row, packages in enumerate(style_rules.LAYERS)
        for i, package in enumerate(packages)
    }


def draw(root: Path) -> str:
    edges, centers = imports(root), box_centers()
    gray, blue = [], []
    for package, others in sorted(edges.items()):
        for other in sorted(others):
            (x0, y0), (x1, y1) = centers[package], centers[other]
            y0, y1 = y0 + BOX_H / 2, y1 - BOX_H / 2 - 3
            bend = (y1 - y0) * 0.45
            path = f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}"
            is_needed = not implied(package, other, edges)
            color, width = ("#2f6bb3", 1.8) if is_needed else ("#c4ccd6", 1.0)
            arrow_head = f'<path d="M{x1 - 4:.0f},{y1 - 4:.0f} L{x1 + 4:.0f},{y1 - 4:.0f} L{x1:.0f},{y1 + 3:.0f} Z"'
            line = f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'
            (blue if is_needed else gray).append(f'{line}{arrow_head} fill="{color}"/>')
    boxes = []
    for package, (x, y) in centers.items():
        corner = f'x="{x - BOX_W / 2:.0f}" y="{y - BOX_H / 2:.0f}"'
        boxes.append(
            f'<rect {corner} width="{BOX_W}" height="{BOX_H}" rx="5" fill="#f7f9fb" stroke="#44546a"/>'
            f'<text x="{x:.0f}" y="{y - 3:.0f}" font-weight="bold" font-size="14">{package}</text>'
            f'<text x="{x:.0f}" y="{y + 14:.0f}" font-size="11" fill="#5a6675">{CONTENTS[package]}</text>'
        )
    height = TOP + LAYER_H * (len(style_rules.LAYERS) - 1) + BOX_H + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    style = ' font-family="Helvetica, Arial, sans-serif" text-anchor="middle" fill="#1d2733">'
    back = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head + style, back, *legend(), *gray, *blue, *boxes, "</svg>", ""])


def legend() -> list[str]:
    """Return the title, the meaning of the arrows, and the number of each layer."""
    lines = [f'<text x="12" y="24" text-anchor="start" font-weight="bold" font-size="16">{TITLE}</text>']
    for row, (color, width, meaning) in enumerate(KEY):
        y = 44 + 18 * row
        lines.append(f'<path d="M12,{y} H44" stroke="{color}" stroke-width="{width}"/>')
        lines.append(f'<path d="M44,{y - 4} L52,{y} L44,{y + 4} Z" fill="{color}"/>')
        lines.append(f'<text x="60" y="{y + 4}" text-anchor="start" font-size="12">{meaning}</text>')
    lines.append(f'<text x="12" y="{TOP - 4}" text-anchor="start" font-size="12" fill="#5a6675">layer</text>')
    for row in range(len(style_rules.LAYERS)):
        y, number = TOP + LAYER_H * row + BOX_H / 2, len(style_rules.LAYERS) - 1 - row
        lines.append(f'<path d="M{LEFT - 20},{y:.0f} H{WIDTH - 8}" stroke="#eef1f4" stroke-width="{BOX_H}"/>')
        lines.append(f'<text x="26" y="{y + 5:.0f}" font-size="14" fill="#5a6675">{number}</text>')
    return lines


if __name__ == "__main__":
    sys.stdout.write(draw(style_rules.ROOT))
