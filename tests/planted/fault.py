"""A planted fault, and how it gets into a copy of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Fault"]

ROOT = Path(__file__).parents[2]

_PACKAGE = Path("src/redislock_fast")


@dataclass(frozen=True)
class Fault:
    """A change of the package that breaks a promise.

    Attributes:
        name: what is wrong then.
        file: the changed file, below the package.
        text: the text that is replaced; it occurs once in the file.
        replacement: what replaces it.
        test: the node id of a test that finds the fault, in a few seconds.
    """

    name: str
    file: str
    text: str
    replacement: str
    test: str

    @property
    def is_compiled(self) -> bool:
        """Whether the changed file belongs to the compiled core."""
        return self.file.endswith(".pyx")

    def occurrences(self, root: Path = ROOT) -> int:
        """How often the text occurs in its file in this tree; 0 where the file is missing."""
        path = root / _PACKAGE / self.file
        return path.read_text().count(self.text) if path.exists() else 0

    def plant(self, root: Path) -> None:
        """Make the change in this tree.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        count = self.occurrences(root)
        if count != 1:
            raise ValueError(f"the text of {self.name!r} occurs {count} times in {self.file}")
        path = root / _PACKAGE / self.file
        path.write_text(path.read_text().replace(self.text, self.replacement))
