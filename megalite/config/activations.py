"""The names of the activations: the files of megalite/kernels/activations/, found without importing torch."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "kernels" / "activations"
ACTIVATIONS = tuple(sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__"))
