"""Prints the notes of a release: its version's section of the changelog.

    python .ci/release_notes.py v1.2.3 > notes.md

A tag that does not name the version of the package is an error, and so is a version without a section.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(tag: str) -> None:
    """Print the notes.

    Args:
        tag: of the release, such as "v1.2.3".
    """
    _, version, _ = ROOT.joinpath("src/redislock_fast/_version.py").read_text("utf-8").rsplit('"', 2)
    if tag != f"v{version}":
        sys.exit(f"the tag is {tag}, but the version of the package is {version}: the tag must be v{version}")
    changelog = ROOT.joinpath("CHANGELOG.md").read_text("utf-8")
    headings = [section.partition("\n") for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]]
    notes = {heading.split()[0]: text.strip() for heading, _, text in headings}
    if not notes.get(version):
        sys.exit(f"CHANGELOG.md says nothing under the heading '## {version}'")
    print(notes[version])


if __name__ == "__main__":
    main(*sys.argv[1:])
