"""The oldest versions that pyproject.toml allows, as constraints for pip: `make bounds` tests with them.

python tests/oldest.py > constraints.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def constraints() -> list[str]:
    """Lines such as `transformers==5.17`, one per dependency of users; torch is installed before."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["training"], *extras["demo"]]
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)", line) for line in wanted]
    found = {match[1]: match[2] for match in bounds if match}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name != "torch"]


if __name__ == "__main__":
    print("\n".join(constraints()))
