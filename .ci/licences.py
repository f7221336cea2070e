"""The licence of each package that `pip install autotune-torch` brings, as a page of the documentation.

    python .ci/licences.py              print docs/licences.md anew
    python .ci/licences.py docs/licences.md    write it

Read from the metadata of what is installed here: what torch brings for a GPU stands in the list only where it is
installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["licence_of", "packages", "page"]

_HEAD = """# Licences

autotune has the MIT licence. `pip install autotune-torch` installs these packages, each with the licence that it
declares; torch's packages for NVIDIA GPUs have NVIDIA's own terms. `python .ci/licences.py` writes this page.

| Package | Licence |
| --- | --- |
"""
_CLASSIFIER = "License :: OSI Approved :: "
_LONGEST = 60  # characters: a field that holds the licence's whole text is left to the package


def packages(root: str = "autotune-torch") -> list[str]:
    """All that a package needs, sorted, itself left out."""
    found, left = set[str](), [root]
    while left:
        name = left.pop()
        for needed in _needed(name):
            if needed not in found:
                found.add(needed)
                left.append(needed)
    return sorted(found - {root})


def _needed(name: str) -> Iterator[str]:
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def licence_of(name: str) -> str:
    """In its own words: an SPDX expression, else its classifiers, else the field."""
    known = metadata.metadata(name)
    if (expression := known.get("License-Expression")) is not None:
        return expression
    classifiers = [
        line.removeprefix(_CLASSIFIER)
        for line in known.get_all("Classifier") or ()
        if _CLASSIFIER in line
    ]
    field = (known.get("License") or "").strip()
    is_short = field and len(field) <= _LONGEST and "\n" not in field
    return ", ".join(classifiers) or (field if is_short else "see its package")


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"| {name} | {licence_of(name)} |\n" for name in packages())


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
