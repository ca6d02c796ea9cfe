"""Where a recipe's own parts are found.

Light: imports no torch.
"""

import os
import sys
from pathlib import Path


def make_importable(recipe: str) -> None:
    """Have module:object names found in this folder and beside the recipe, here and on the ranks started here."""
    for folder in (Path.cwd(), Path(recipe).parent.resolve() if Path(recipe).is_file() else Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
            known = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{known}{os.pathsep}{folder}" if known else str(folder)
