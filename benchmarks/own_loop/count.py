"""Count the lines of code of the same adversarial training: without blank lines, comments and texts that explain.

The dataset and the networks, which all import from examples/gan.py, do not count.
"""

import ast
import tokenize
from pathlib import Path

HERE = Path(__file__).parent
FILES = {
    "tutti.start": HERE.parents[1] / "examples" / "gan.py",
    "torch DDP": HERE / "gan_ddp.py",
    "Accelerate": HERE / "gan_accelerate.py",
    "Lightning Fabric": HERE / "gan_fabric.py",
}
SHARED = ("Ring", "network")
NO_CODE = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
NO_CODE |= {tokenize.INDENT, tokenize.DEDENT}


def code_lines(path: Path) -> int:
    """Return the number of lines that hold code of the program itself."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        explains = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (explains or getattr(node, "name", None) in SHARED):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with open(path, "rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NO_CODE]
    return len({token.start[0] for token in tokens} - skipped)


def main() -> None:
    for name, path in FILES.items():
        print(f"{name:18}{code_lines(path):4} lines  {path.name}")


if __name__ == "__main__":
    main()
