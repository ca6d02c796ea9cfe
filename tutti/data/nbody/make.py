"""A box of matched N-body and hydrodynamic fields from Lagrangian perturbation theory and a stated gas prescription.

White noise, one generator a plane, becomes the linear density; its gradients move one particle a cell; cloud-in-cell in
whole numbers gives density and momentum; smoothing and two heating terms give the gas (formulas: `PRESCRIPTION`).
Every field is streamed plane by plane, so that a box may be larger than memory.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from tutti.data.nbody import cosmology as physics
from tutti.data.nbody.grid_fft import Grid, Space, forward, grid_bytes, inverse, smooth
from tutti.data.nbody.picture import draw_slices
from tutti.errors import ConfigError, DataError
from tutti.records.record import versions

FORMAT = 1
UNIVERSE, REDSHIFT = physics.Cosmology(), 3.0
CELL = 0.1  # Mpc/h
GRIDS = 10  # fields that live at once: displacement, velocity, and density and velocity on the grid
CHUNK = 16  # a random crop of 64^3 reads 1.9 times its bytes in about 120 pieces; with 32 it would be 3.3 times

DENSITY_SCALE = 14.0  # x = ln(rho / mean) / 14
DENSITY_FLOOR = 1e-3  # of the mean, for empty cells
VELOCITY_SCALE = 1000.0  # km/s, some five times the root mean square of a large box
TEMPERATURE_MIDDLE, TEMPERATURE_SCALE = 4.5, 3.0  # x = (log10 T - 4.5) / 3

K_FILTER = 8.0  # h/Mpc
T0, GAMMA, DENSITY_CAP = 1.0e4, 1.5, 1e3  # K
SHOCK_LENGTH, SHOCK_HEAT = 0.5, 13.4  # Mpc/h; K per (km/s)^2, 3 mu m_p / (16 k_B) with mu = 0.59

_BITS = 10  # positions are whole steps of 1/1024 cell, so that a particle's eight weights are whole and add up exactly
_STEPS = 1 << _BITS
_WEIGHT = _STEPS**3
_MOMENTUM_STEPS = 64  # of 1 km/s: 30,000 particles of 4,000 km/s in one cell stay within 63 bits

PRESCRIPTION = f"""\
Dark matter: the linear density at the redshift, smoothed with a Gaussian of the radius at which it varies by 1
(smoothing_radius), moves one particle a cell by Lagrangian perturbation theory of second order; cloud-in-cell.
Gas, densities in units of the mean: delta_b = delta_dm exp(-k^2 / k_F^2), k_F = {K_FILTER} h/Mpc; velocities likewise.
T = {T0:g} K min(rho_b, {DENSITY_CAP:g})^{GAMMA - 1:g} + {SHOCK_HEAT} K (jump / km/s)^2 max(0, 1 - 1 / rho_b),
where jump = max(0, -div v_b) * {SHOCK_LENGTH} Mpc/h: photo-heated gas, and strong shocks where dense gas converges.
Densities below {DENSITY_FLOOR:g} of the mean count as that."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Box:
    """What is made: a periodic cube of a universe, and where its fields live while it is made."""

    space: Space
    cell: float  # comoving Mpc/h
    seed: int
    report: Report
    universe: physics.Cosmology = UNIVERSE
    z: float = REDSHIFT

    @property
    def side(self) -> float:
        return self.space.box * self.cell

    def table(self, function: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        """A function of k in h/Mpc over squared wave numbers; 0 at k = 0."""
        k = 2 * np.pi / self.side * np.sqrt(np.arange(1, self.space.num_squares()))
        return torch.from_numpy(np.append(0.0, function(k)).astype(np.float32)).to(self.space.device)

    def planes(self, stage: str) -> Iterator[int]:
        """The planes of the box in order, reported as a stage."""
        for x in range(self.space.box):
            yield x
            self.report(stage, x + 1, self.space.box)


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
    """Write the HDF5 file of a box and a PNG of its slices beside it; what is unfinished never has their names."""
    out = Path(out)
    cell = CELL if cell is None else cell
    check_values(box, cell, seed, memory_gib)
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists already. Remove it, overwrite it (--overwrite), or choose another name.")
    place = find_device(device)
    make_folder(out.parent)
    memory, work_bytes = share_memory(box, memory_gib, place)
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
    """Refuse what cannot be made."""
    if box < 16 or box % 2:
        raise ConfigError(f"box={box}: expected an even number of cells, 16 or more. Try box={max(16, box + box % 2)}.")
    if not (0 < cell < math.inf):
        raise ConfigError(f"cell={cell}: expected a length above 0 in Mpc/h. The default is {CELL}.")
    if not (0 <= seed < 2**64):
        raise ConfigError(f"seed={seed}: expected a whole number from 0 to 2^64 - 1.")
    if not (0 < memory_gib < math.inf):
        raise ConfigError(f"memory_gib={memory_gib}: expected a size above 0 in GiB. The default is 2.")


def make_folder(folder: Path) -> None:
    """Make sure of a folder to write to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written to: {error.strerror}. Choose another folder for the box."
        ) from error


def find_device(name: str) -> torch.device:
    """The device of a name, if it is here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no device of torch: expected cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}, but torch sees {torch.cuda.device_count()} GPU(s) here. Set device=cpu.")
    return device


def scratch_bytes(box: int) -> int:
    """What the fields take while a box is made: disk beside the output, unless they fit in memory."""
    return GRIDS * grid_bytes(box)


def output_bytes(box: int) -> int:
    """What the file of a box takes."""
    return 4 * 9 * (math.ceil(box / CHUNK) * CHUNK) ** 3


def share_memory(box: int, memory_gib: float, device: torch.device) -> tuple[torch.device | None, int]:
    """The device whose memory holds all fields, a GPU first, or none; and the bytes that remain to work on them."""
    memory = int(memory_gib * 2**30)
    home = torch.device("cpu") if scratch_bytes(box) <= memory // 2 else None
    if device.type != "cuda":
        return home, memory * 3 // 8
    free = torch.cuda.mem_get_info(device)[0]
    return (device, free // 4) if scratch_bytes(box) <= free // 2 else (home, min(memory, free) // 4)


def check_disk(folder: Path, box: int, with_scratch: bool) -> None:
    """Refuse a box that would fill the disk."""
    needed = output_bytes(box) + with_scratch * scratch_bytes(box)
    free = shutil.disk_usage(folder).free
    if needed > free:
        scratch = f" (of which {scratch_bytes(box) / 2**30:.1f} GiB are scratch)" if with_scratch else ""
        raise DataError(
            f"a box of {box}^3 needs {needed / 2**30:.1f} GiB of disk{scratch}, "
            f"but {folder} has {free / 2**30:.1f} GiB free. Free space there, write elsewhere, or choose a smaller box."
        )


def write_box(file: h5py.File, box: Box) -> None:
    """Everything a box is, in the order it is made."""
    linear = linear_density(box, physics.nonlinear_radius(box.universe, box.z))
    displacement, velocity = move(box, linear)
    density, *flow = deposit(box, displacement, velocity)
    for grid in (*displacement, *velocity):
        grid.release()

    write_header(file, box)
    write_nbody(create(file, "Nbody", box, ["density"]), box, density, flow)
    filtering = box.table(lambda k: np.exp(-((k / K_FILTER) ** 2)))
    filtering[0] = 1.0
    for done, grid in enumerate((density, *flow)):
        smooth(grid, filtering, box.space)
        box.report("gas", done + 1, 4)
    write_hydro(create(file, "Hydro", box, ["density", "temperature"]), box, density, flow)
    for grid in (density, *flow):
        grid.release()


def linear_density(box: Box, radius: float = 0.0) -> Grid:
    """The spectrum of the linear density, a Gaussian random field smoothed with a Gaussian of a radius in Mpc/h."""
    grid, num = box.space.grid(), box.space.box
    for x in box.planes("noise"):
        generator = np.random.Generator(np.random.Philox(key=np.array([box.seed, x], np.uint64)))
        grid.real()[x].copy_(torch.from_numpy(generator.standard_normal((num, num), np.float32)))

    def amplitude(k: np.ndarray) -> np.ndarray:
        noise_power = box.cell**3  # that of white noise of variance 1
        return np.sqrt(physics.power(k, box.universe, box.z) / noise_power) * physics.gaussian(k * radius)

    forward(grid, box.space, box.table(amplitude))
    return grid


def move(box: Box, linear: Grid) -> tuple[list[Grid], list[Grid]]:
    """How far particles have moved, in cells, and their velocities in km/s; releases the linear density."""
    omega = physics.matter_share(box.z, box.universe)
    second = 3 / 7 * omega ** (-1 / 143)  # this and the second growth rate: Bouchet et al. (1995)
    rates = physics.growth_rate(box.z, box.universe), 2 * omega ** (6 / 11)
    flow = physics.hubble_flow(box.z, box.universe)
    source, potential = second_source(box, linear), box.table(lambda k: 2 * np.pi / box.side / k**2)

    def gradient(axis: int, weights: tuple[float, float]) -> Grid:
        def modes(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
            wave = potential[box.space.squares(y)] * box.space.waves(axis, y)
            return (sheets[0] * weights[0] + sheets[1] * weights[1]) * torch.complex(torch.zeros_like(wave), wave)

        grid = box.space.grid()
        inverse(grid, [linear, source], modes, box.space)
        return grid

    grids = []
    for weights in ((1 / box.cell, second / box.cell), (flow * rates[0], flow * rates[1] * second)):
        for axis in range(3):
            grids.append(gradient(axis, weights))
            box.report("motion", len(grids), 6)
    linear.release()
    source.release()
    return grids[:3], grids[3:]


def second_source(box: Box, linear: Grid) -> Grid:
    """The spectrum of phi_ii phi_jj - phi_ij^2, summed over pairs of axes; phi_ij are the tides of the density."""
    first, second, source = (box.space.grid() for _ in range(3))
    unit = box.table(lambda k: (2 * np.pi / box.side / k) ** 2)

    def tide(out: Grid, one: int, other: int) -> None:
        def modes(y: int, sheets: list[torch.Tensor]) -> torch.Tensor:
            return sheets[0] * (unit[box.space.squares(y)] * box.space.waves(one, y) * box.space.waves(other, y))

        inverse(out, [linear], modes, box.space)

    tide(first, 0, 0)
    tide(second, 1, 1)
    for x in box.planes("tides xx, yy"):
        source.real()[x].copy_(first.real()[x] * second.real()[x])
        first.real()[x].add_(second.real()[x])
    tide(second, 2, 2)
    for x in box.planes("tides zz"):
        source.real()[x].add_(first.real()[x] * second.real()[x])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        tide(first, one, other)
        for x in box.planes(f"tides {'xyz'[one]}{'xyz'[other]}"):
            source.real()[x].sub_(first.real()[x] * first.real()[x])
    first.release()
    second.release()
    forward(source, box.space)
    return source


def deposit(box: Box, displacement: list[Grid], velocity: list[Grid]) -> list[Grid]:
    """Density in units of the mean and three velocities in km/s; an empty cell has that of its own particle."""
    num, grids = box.space.box, [box.space.grid() for _ in range(4)]
    reach = [plane_reach(box, displacement[0], x) for x in range(num)]
    for start, stop in slabs(box):
        mass, *momenta = sums = [
            torch.zeros((stop - start) * num**2, dtype=torch.int64, device=box.space.device) for _ in range(4)
        ]
        for x, (low, high) in enumerate(reach):
            if (low - start) % num < stop - start or (start - low) % num <= high - low:
                add_plane(box, x, displacement, velocity, start, stop, sums)
        for x in range(start, stop):
            here = slice((x - start) * num**2, (x - start + 1) * num**2)
            weight = mass[here].view(num, num).double()
            grids[0].real()[x].copy_(weight / _WEIGHT)
            for grid, momentum, own in zip(grids[1:], momenta, velocity, strict=True):
                mean = momentum[here].view_as(weight) / (weight * _MOMENTUM_STEPS)
                grid.real()[x].copy_(mean.where(weight > 0, own.real()[x].to(mean)))
        box.report("deposit", stop, num)
    return grids


def slabs(box: Box) -> Iterator[tuple[int, int]]:
    """The planes whose sums lie in memory at once."""
    plane_bytes = 4 * 8 * box.space.box**2
    count = max(1, min(box.space.box, box.space.work_bytes // plane_bytes))
    for start in range(0, box.space.box, count):
        yield start, min(start + count, box.space.box)


def plane_reach(box: Box, along: Grid, x: int) -> tuple[int, int]:
    """The first and last plane that the particles of a plane touch, not yet wrapped around the box."""
    low, high = torch.aminmax(position(box, along, x, x))
    return int(low) >> _BITS, (int(high) >> _BITS) + 1


def position(box: Box, displacement: Grid, x: int, lattice: torch.Tensor | int) -> torch.Tensor:
    """Where the particles of a plane are along an axis, in whole steps."""
    moved = displacement.real()[x].to(box.space.device) * _STEPS
    return moved.round().to(torch.int64) + lattice * _STEPS


def add_plane(
    box: Box, x: int, displacement: list[Grid], velocity: list[Grid], start: int, stop: int, sums: list[torch.Tensor]
) -> None:
    """Add the particles of plane x to the sums of planes start..stop: whole numbers, whose order does not matter."""
    num = box.space.box
    lattice = torch.arange(num, device=box.space.device)
    places = [
        position(box, grid, x, along).flatten()
        for grid, along in zip(displacement, (x, lattice[:, None], lattice[None, :]), strict=True)
    ]
    speeds = [(grid.real()[x].to(box.space.device) * _MOMENTUM_STEPS).round().long().flatten() for grid in velocity]
    for side in (0, 1):
        plane = ((places[0] >> _BITS) + (side - start)) % num
        chosen = [*places, *speeds]
        if stop - start < num:
            inside = (plane < stop - start).nonzero().squeeze(1)
            plane, chosen = plane[inside], [values[inside] for values in chosen]
        add_corners(num, side, plane, chosen[:3], chosen[3:], sums)


def add_corners(
    num: int,
    side: int,
    plane: torch.Tensor,
    places: list[torch.Tensor],
    speeds: list[torch.Tensor],
    sums: list[torch.Tensor],
) -> None:
    """Add the four of a particle's eight cells that lie in a plane."""
    parts = [place & (_STEPS - 1) for place in places]
    shares = [(_STEPS - part, part) for part in parts]
    rows, columns = (((place >> _BITS) % num, ((place >> _BITS) + 1) % num) for place in places[1:])
    for row, row_share in zip(rows, shares[1], strict=True):
        line, line_share = (plane * num + row) * num, shares[0][side] * row_share
        for column, column_share in zip(columns, shares[2], strict=True):
            index, weight = line + column, line_share * column_share
            sums[0].scatter_add_(0, index, weight)
            for total, speed in zip(sums[1:], speeds, strict=True):
                total.scatter_add_(0, index, weight * speed)


def create(file: h5py.File, name: str, box: Box, channels: list[str]) -> h5py.Dataset:
    """An empty dataset that says what its channels are: value * scale + offset is the quantity named."""
    edge = min(CHUNK, box.space.box)
    meaning = {
        "density": ("ln(density / mean)", "", DENSITY_SCALE, 0.0),
        "temperature": ("log10(temperature / K)", "", TEMPERATURE_SCALE, TEMPERATURE_MIDDLE),
    }
    rows = [meaning[channel] for channel in channels]
    rows += [(f"velocity {axis}", "km/s", VELOCITY_SCALE, 0.0) for axis in "xyz"]
    shape = (len(rows), *(box.space.box,) * 3)
    data = file.create_dataset(name, shape, np.float32, chunks=(len(rows), edge, edge, edge))
    for attribute, values in zip(("channels", "units", "scale", "offset"), zip(*rows, strict=True), strict=True):
        data.attrs[attribute] = values
    return data


def write_nbody(data: h5py.Dataset, box: Box, density: Grid, flow: list[Grid]) -> None:
    """Dark matter: density and velocities, scaled to about -1..1."""

    def channels(x: int) -> list[torch.Tensor]:
        plane, *velocities = (grid.real()[x].to(box.space.device) for grid in (density, *flow))
        return [scale_density(plane), *(scale_velocity(velocity) for velocity in velocities)]

    write_channels(data, box, "N-body file", channels)


def write_hydro(data: h5py.Dataset, box: Box, density: Grid, flow: list[Grid]) -> None:
    """Gas: density, temperature and velocities, scaled to about -1..1."""

    def channels(x: int) -> list[torch.Tensor]:
        plane, *velocities = (grid.real()[x].to(box.space.device) for grid in (density, *flow))
        before, after = (flow[0].real()[(x + step) % box.space.box].to(box.space.device) for step in (-1, 1))
        heat = temperature(plane, divergence(before, after, velocities[1], velocities[2], box.cell))
        warmth = ((heat.log10() - TEMPERATURE_MIDDLE) / TEMPERATURE_SCALE).clamp(-1, 1)
        return [scale_density(plane), warmth, *(scale_velocity(velocity) for velocity in velocities)]

    write_channels(data, box, "hydro file", channels)


def write_channels(data: h5py.Dataset, box: Box, stage: str, channels: Callable[[int], list[torch.Tensor]]) -> None:
    """Write plane by plane, as many at once as a chunk is thick."""
    num, thickness = box.space.box, min(CHUNK, box.space.box)
    for start in range(0, num, thickness):
        planes = range(start, min(start + thickness, num))
        data[:, planes.start : planes.stop] = torch.stack([torch.stack(channels(x)).cpu() for x in planes], 1).numpy()
        box.report(stage, planes.stop, num)


def scale_density(density: torch.Tensor) -> torch.Tensor:
    """x of a density in units of the mean, so that exp(14 x) gives it back."""
    return (density.clamp(min=DENSITY_FLOOR).log() / DENSITY_SCALE).clamp(-1, 1)


def scale_velocity(velocity: torch.Tensor) -> torch.Tensor:
    """Velocities in units of their scale, not clipped."""
    return velocity / VELOCITY_SCALE


def divergence(
    before: torch.Tensor, after: torch.Tensor, along_y: torch.Tensor, along_z: torch.Tensor, cell: float
) -> torch.Tensor:
    """Central differences of velocity in a plane, km/s per Mpc/h; along x from the planes on both sides."""
    differences = after - before
    for axis, velocity in ((0, along_y), (1, along_z)):
        differences = differences + (velocity.roll(-1, axis) - velocity.roll(1, axis))
    return differences / (2 * cell)


def temperature(density: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
    """Kelvin: the density law of photo-heated gas, and shocks where dense gas converges."""
    density = density.clamp(min=DENSITY_FLOOR)
    photoheated = T0 * density.clamp(max=DENSITY_CAP) ** (GAMMA - 1)
    jump = divergence.clamp(max=0) * SHOCK_LENGTH
    return photoheated + SHOCK_HEAT * jump * jump * (1 - 1 / density).clamp(min=0)


def write_header(file: h5py.File, box: Box) -> None:
    """Everything that tells what the box is and how it was made."""
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
            "smoothing_radius": physics.nonlinear_radius(box.universe, box.z),
            "prescription": PRESCRIPTION,
            "density_floor": DENSITY_FLOOR,
            "normalisation": "value * scale + offset of a channel is the quantity named in channels, in its units",
        }
    )
