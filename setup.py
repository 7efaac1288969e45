"""The parts of the build that pyproject.toml cannot describe.

A wheel also contains the programs that are next to the package in a clone, below megalite/programs, where the command
`megalite` finds them (megalite/__main__.py). An editable install needs none.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SUFFIXES = (".py", ".css", ".toml")  # of programs and the data that they read
FILES = [*Path("tools").rglob("*"), *Path("examples/recipes").glob("*"), *Path("examples/plugins").glob("*")]
PROGRAMS = ["pretrain_gpt.py", *sorted(str(path) for path in FILES if path.suffix in SUFFIXES)]


class WithPrograms(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in PROGRAMS:
                target = Path(self.build_lib, "megalite", "programs", name)
                self.mkpath(str(target.parent))
                self.copy_file(name, str(target), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        """For a source distribution, of which a wheel can then be built."""
        return [*super().get_source_files(), *PROGRAMS]


setup(cmdclass={"build_py": WithPrograms})
