"""Headers and pictures of boxes."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from tutti.data.nbody.make import make_nbody
from tutti.data.nbody.picture import draw_slices, read_header
from tutti.errors import DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nbody(tmp_path_factory.mktemp("boxes") / "box.h5", 16)


def test_picture_stands_beside_the_box_and_shows_every_channel(made: Path) -> None:
    with Image.open(made.with_suffix(".png")) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (860, 2000, 3)
    for row, column in [(0, place) for place in range(4)] + [(1, place) for place in range(5)]:
        panel = pixels[430 * row : 430 * (row + 1), 400 * column : 400 * (column + 1)]
        assert len(np.unique(panel.reshape(-1, 3), axis=0)) > 50, (row, column)


@pytest.mark.system
def test_header_is_read_without_torch(made: Path) -> None:
    program = (
        "import sys; from tutti.data.nbody.picture import read_header; "
        f"print(read_header({str(made)!r})['box'], 'torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["16", "False", "False"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.h5 cannot be read as HDF5"):
        read_header(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("text")
    with pytest.raises(DataError, match=r"text.h5 cannot be read as HDF5"):
        draw_slices(tmp_path / "text.h5", tmp_path / "text.png")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["Images"] = [1, 2]
    with pytest.raises(DataError, match=r"other.h5 holds Images: expected the datasets Nbody and Hydro"):
        read_header(tmp_path / "other.h5")
