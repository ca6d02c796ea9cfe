"""Makes a box of matched N-body and hydrodynamic fields by Lagrangian perturbation theory and a gas prescription.

White noise, with one generator per plane, becomes the linear density. Its gradients move one particle per cell.
Cloud-in-cell in integers gives density and momentum. Smoothing and two heating terms give the gas (formulas:
`gas.PRESCRIPTION`). Every field is streamed plane by plane, so that a box may be larger than memory.
"""

import math
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import h5py
import numpy as np
import torch

from tutti.data.nbody.box import CHUNK, create, write_hydro, write_nbody
from tutti.data.nbody.cosmology import nonlinear_radius
from tutti.data.nbody.gas import DENSITY_FLOOR, PRESCRIPTION, smooth_to_gas
from tutti.data.nbody.grid import Box, Report, Space, grid_bytes
from tutti.data.nbody.motion import deposit, linear_density, move
from tutti.data.nbody.picture import draw_slices
from tutti.errors import ConfigError, DataError
from tutti.runs.record import versions

FORMAT = 1
CELL = 0.1  # Mpc/h
GRIDS = 10  # fields that exist at once: displacement, velocity, and density and velocity on the grid


def make_nbody(
    out: Path,
    box: int = 256,
    cell: float | None = None,
    seed: int = 1,
    memory_gib: float = 2.0,
    device: str = "cpu",
    report: Report = lambda stage, done, total: None,
    overwrite: bool = False,
) -> Path:
    """Writes the HDF5 file of a box and a PNG of its slices; both get their names when they are complete."""
    out = Path(out)
    cell = CELL if cell is None else cell
    check_values(box, cell, seed, memory_gib)
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists already. Remove it, overwrite it (--overwrite), or choose another name.")
    place = find_device(device)
    make_folder(out.parent)
    memory, work_bytes = choose_storage(box, memory_gib, place)
    check_disk(out.parent, box, with_scratch=memory is None)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        space = Space(box, place, work_bytes, memory or Path(folder))
        whole, picture = Path(folder, "box.h5"), Path(folder, "box.png")
        with h5py.File(whole, "w", libver=("v110", "latest")) as file:
            write_box(file, Box(space, cell, seed, report))
        draw_slices(whole, picture)
        os.replace(whole, out)
        os.replace(picture, out.with_suffix(".png"))
    return out


def check_values(box: int, cell: float, seed: int, memory_gib: float) -> None:
    """Raises ConfigError for values out of range."""
    if box < 16 or box % 2:
        raise ConfigError(f"box={box}: expected an even number of cells, 16 or more. Try box={max(16, box + box % 2)}.")
    if not (0 < cell < math.inf):
        raise ConfigError(f"cell={cell}: expected a length above 0 in Mpc/h. The default is {CELL}.")
    if not (0 <= seed < 2**64):
        raise ConfigError(f"seed={seed}: expected a whole number from 0 to 2^64 - 1.")
    if not (0 < memory_gib < math.inf):
        raise ConfigError(f"memory_gib={memory_gib}: expected a size above 0 in GiB. The default is 2.")


def make_folder(folder: Path) -> None:
    """Creates a folder and checks that it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to: {error.strerror}. Choose another folder for the box."
        ) from error


def find_device(name: str) -> torch.device:
    """Returns the device of a name; raises ConfigError if torch does not see it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a device of torch: expected cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}, but torch sees {torch.cuda.device_count()} GPU(s) here. Set device=cpu.")
    return device


def scratch_bytes(box: int) -> int:
    """The size of all fields that exist at once; they are scratch files unless they fit in memory."""
    return GRIDS * grid_bytes(box)


def output_bytes(box: int) -> int:
    """The size of the output file."""
    return 4 * 9 * (math.ceil(box / CHUNK) * CHUNK) ** 3


def choose_storage(box: int, memory_gib: float, device: torch.device) -> tuple[torch.device | None, int]:
    """Returns the device whose memory holds all fields (a GPU if possible, None for files) and the bytes for work."""
    memory = int(memory_gib * 2**30)
    storage = torch.device("cpu") if scratch_bytes(box) <= memory // 2 else None
    if device.type != "cuda":
        return storage, memory * 3 // 8
    free = torch.cuda.mem_get_info(device)[0]
    return (device, free // 4) if scratch_bytes(box) <= free // 2 else (storage, min(memory, free) // 4)


def check_disk(folder: Path, box: int, with_scratch: bool) -> None:
    """Raises DataError if the disk has too little free space."""
    needed = output_bytes(box) + with_scratch * scratch_bytes(box)
    free = shutil.disk_usage(folder).free
    if needed > free:
        scratch = f" (of which {scratch_bytes(box) / 2**30:.1f} GiB are scratch)" if with_scratch else ""
        raise DataError(
            f"a box of {box}^3 needs {needed / 2**30:.1f} GiB of disk{scratch}, "
            f"but {folder} has {free / 2**30:.1f} GiB free. Free space there, write elsewhere, or choose a smaller box."
        )


def write_box(file: h5py.File, box: Box) -> None:
    """Computes and writes all fields of a box."""
    linear = linear_density(box, nonlinear_radius(box.universe, box.z))
    displacement, velocity = move(box, linear)
    density, *flow = deposit(box, displacement, velocity)
    for grid in (*displacement, *velocity):
        grid.release()

    write_header(file, box)
    write_nbody(create(file, "Nbody", box, ["density"]), box, density, flow)
    smooth_to_gas(box, [density, *flow])
    write_hydro(create(file, "Hydro", box, ["density", "temperature"]), box, density, flow)
    for grid in (density, *flow):
        grid.release()


def write_header(file: h5py.File, box: Box) -> None:
    """Writes the parameters of the box and how it was made as attributes."""
    file.attrs.update(
        {
            "format": FORMAT,
            "generator": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "device": box.space.device.type,
            "seed": np.uint64(box.seed),
            "box": box.space.box,
            "cell": box.cell,
            "side": box.side,
            "length_unit": "comoving Mpc/h",
            "redshift": box.z,
            **asdict(box.universe),
            "power_spectrum": "Eisenstein & Hu 1998 without wiggles, flat LCDM",
            "reference": "redshift and channels as in arXiv:2106.12662",
            "smoothing_radius": nonlinear_radius(box.universe, box.z),
            "prescription": PRESCRIPTION,
            "density_floor": DENSITY_FLOOR,
            "normalisation": "value * scale + offset of a channel is the quantity named in channels, in its units",
        }
    )
