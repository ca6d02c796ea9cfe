"""The header of a box and a picture of its slices, without torch; only drawing imports matplotlib."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tutti.errors import DataError

THICKNESS = 4  # cells that are averaged


def read_header(path: Path) -> dict[str, Any]:
    """Returns the attributes of a box as plain values, those of its datasets under their names."""
    with _open(path) as file:
        header = _plain(file.attrs)
        for name in ("Nbody", "Hydro"):
            data = file[name]
            header[name] = _plain(data.attrs) | {"shape": list(data.shape), "chunks": list(data.chunks or ())}
    return header


def draw_slices(path_h5: Path, path_png: Path) -> None:
    """Draws the nine channels of a box, each as the mean of a few planes, in physical units."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    header = read_header(path_h5)
    figure = Figure(figsize=(20, 8.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 5, squeeze=False)
    for row, name in zip(axes, ("Nbody", "Hydro"), strict=True):
        with _open(path_h5) as file:
            planes = file[name][:, :THICKNESS].mean(axis=1)
        for axis in row[len(planes) :]:
            axis.set_axis_off()
        for channel, axis in enumerate(row[: len(planes)]):
            _draw_channel(figure, axis, planes[channel], channel, name, header)
    figure.suptitle(
        f"{header['box']}$^3$ cells, {header['side']:g} Mpc/h, z = {header['redshift']:g}, seed {header['seed']}: "
        f"mean of {THICKNESS} planes"
    )
    figure.savefig(path_png, dpi=100)


def _draw_channel(figure: Any, axis: Any, plane: np.ndarray, channel: int, name: str, header: dict[str, Any]) -> None:
    about = header[name]
    values = plane * about["scale"][channel] + about["offset"][channel]
    quantity, unit = about["channels"][channel], about["units"][channel]
    velocity = bool(unit)
    limit = float(np.abs(values).max()) if velocity else None
    image = axis.imshow(
        values.T,
        origin="lower",
        extent=(0, header["side"], 0, header["side"]),
        cmap="RdBu_r" if velocity else "inferno" if "temperature" in quantity else "viridis",
        vmin=-limit if limit else None,
        vmax=limit,
    )
    axis.set_title(f"{name} {quantity}" + (f" [{unit}]" if unit else ""), fontsize=10)
    axis.set_xlabel("y [Mpc/h]")
    axis.set_ylabel("z [Mpc/h]")
    figure.colorbar(image, ax=axis, shrink=0.8)


def _open(path: Path) -> Any:
    """Opens a box file; typed Any, because h5py's types of members are too wide."""
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read as HDF5: {error}. Make a box with: tutti data make nbody --out {path}."
        ) from error
    if not {"Nbody", "Hydro"} <= set(file):
        found = ", ".join(file) or "nothing"
        file.close()
        raise DataError(f"{path} holds {found}: expected the datasets Nbody and Hydro. Name the file of a box.")
    return file


def _plain(attributes: Any) -> dict[str, Any]:
    return {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        for key, value in attributes.items()
    }
