"""Small Python environments of their own, whose package `tutti` tells where it runs from."""

import sys
from pathlib import Path

# It stands for tutti in job scripts: ranks print one line, and the calls around them do nothing.
TELLING = """
import json, os, socket, sys
if sys.argv[1] == "train":
    import neighbour, tutti
    found = dict(rank=int(os.environ.get("SLURM_PROCID", 0)), host=socket.gethostname())
    found["from"] = [sys.executable, tutti.__file__, neighbour.__file__, json.__file__]
    with open("/proc/self/maps") as maps:  # the shared library of Python, where it has one
        found["from"] += [line.split()[-1] for line in maps if "libpython" in line][:1]
    os.write(1, (json.dumps(found) + "\\n").encode())
"""


# Whether a virtual environment of this interpreter moves without its base: a Python in /usr is on every node.
BASE_STAYS = Path(sys.base_prefix).is_relative_to("/usr")
MEBIBYTES = 4  # that an environment has at least


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with two packages, one of them in a folder of sources; return its interpreter."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (folder / "venv" / "bin").mkdir()
    base = Path(sys.base_prefix) / "bin"
    (folder / "venv" / "bin" / "python").symlink_to(base / version)
    (folder / "venv" / "pyvenv.cfg").write_text(f"home = {base}\ninclude-system-site-packages = false\n")
    for name, content in (("__init__", ""), ("__main__", TELLING)):
        (packages / "tutti").mkdir(exist_ok=True)
        (packages / "tutti" / f"{name}.py").write_text(content)
    (packages / "tutti" / "table.bin").write_bytes(bytes(MEBIBYTES << 20))
    sources = folder / "sources"
    sources.mkdir()
    (sources / "neighbour.py").write_text("")
    (sources / "runs").mkdir()
    (sources / "runs" / "large.bin").write_bytes(bytes(1000))
    (packages / "neighbour.pth").write_text(f"{sources}\n")
    return folder / "venv" / "bin" / "python"
