"""Weights alone: read from a checkpoint of any layout or from a file, and put into a model on any layout."""

import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tutti.checkpoint.manifest import choose, read_manifest, verify
from tutti.checkpoint.store import KEPT, read_kept
from tutti.config.schema import SAFETENSORS, InitConfig
from tutti.errors import CheckpointError, ConfigError

_PREFIX, _AVERAGES = "model", "ema"  # the keys of trained weights, and of those of their averages that there are
_WITHIN = ("state_dict", "model_state_dict", "model")  # where training programs put the weights in what they save
_SHOWN = 6  # names in a message

Weights = dict[str, torch.Tensor]


def read_checkpoint(folder: Path, averages: bool = False) -> Weights:
    """The whole tensors of a verified checkpoint of torch on the CPU, whatever layout it was saved from.

    With `averages`, a weight that was averaged over steps is its average.
    """
    if (folder / KEPT).is_file():
        names = list(read_manifest(folder).model)
        wanted = set(names)
        state = read_kept(folder, needs=lambda key: ".".join(map(str, key)) in wanted, alone=True)
        named = [(name, values) for name, values in state.items() if isinstance(values, dict)]
        kept = {f"{name}.{key}": value for name, values in named for key, value in values.items()}
        return {name: kept[name] for name in names}
    reader = dcp.FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    names = [name for name in read_manifest(folder).model if f"{_PREFIX}.{name}" in found]
    weights: Weights = {}
    for name in names:
        about = found[f"{_PREFIX}.{name}"]
        assert isinstance(about, TensorStorageMetadata)
        weights[name] = torch.empty(about.size, dtype=about.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own inner API
        dcp.load(_by_key(folder, weights, found, averages), storage_reader=reader, no_dist=True)
    return weights


def load_model(folder: Path, model: nn.Module, averages: bool = False) -> None:
    """Read the weights of a verified checkpoint, or their averages, into a model on any layout; every rank enters."""
    reader = dcp.FileSystemReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = get_model_state_dict(model)
        dcp.load(_by_key(folder, state, reader.read_metadata().state_dict_metadata, averages), storage_reader=reader)
    set_model_state_dict(model, state)


def _by_key(
    folder: Path, weights: Mapping[str, Any], found: Mapping[str, Any], averages: bool
) -> dict[str, dict[str, Any]]:
    """The keys of a checkpoint from which weights are read; of buffers that no average is made of, the trained ones."""
    averaged = {name: value for name, value in weights.items() if averages and f"{_AVERAGES}.{name}" in found}
    if averages and not averaged:
        raise CheckpointError(
            f"checkpoint {folder} holds no averaged weights: expected one of a run with ema. Leave --ema out."
        )
    trained = {name: value for name, value in weights.items() if name not in averaged}
    return {key: values for key, values in ((_PREFIX, trained), (_AVERAGES, averaged)) if values}


def read_file(path: Path) -> Weights:
    """The tensors of a file of safetensors or of torch, on the CPU; torch's is opened without executing any code."""
    try:
        if path.suffix in SAFETENSORS:
            return _safetensors(f"{path}").load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # both libraries raise almost anything on bytes that are wrong
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{path} cannot be read as weights ({type(error).__name__}: {reason}): expected a file of safetensors, or "
            "a state dict that torch.save has written."
        ) from error
    for key in _WITHIN:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    named = content.items() if isinstance(content, dict) else ()
    weights = {str(name): value for name, value in named if isinstance(value, torch.Tensor)}
    if not weights:
        raise ConfigError(f"{path} holds no tensors by name: expected a state dict, as model.state_dict() gives it.")
    return weights


def _safetensors(needed_for: str) -> Any:
    """The module that reads and writes safetensors, an extra."""
    try:
        import safetensors.torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{needed_for} needs safetensors. Install it: pip install 'tutti-train[safetensors]'."
        ) from None
    return safetensors.torch


def write_safetensors(path: Path, weights: Weights, metadata: dict[str, str]) -> None:
    """Write tensors by name with texts about them."""
    _safetensors("--to safetensors").save_file(weights, path, metadata)


@dataclass(frozen=True)
class StartingPoint:
    """The weights from which a run began, by name: taken, and why others were not."""

    source: str
    loaded: list[str]
    left_out: list[str]  # in the source, and not chosen or not in the model
    missing: list[str]  # in the model and chosen, and not in the source
    mismatched: dict[str, str]  # of another shape

    def record(self) -> dict[str, Any]:
        """As plain values, for the record."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        whole = len(self.loaded) + len(self.missing) + len(self.mismatched)
        told = [f"weights from {self.source}: {len(self.loaded)} of {whole} tensors loaded"]
        for what, names in (
            ("left out, and not used by this run", self.left_out),
            ("not in the source, and begun afresh", self.missing),
            ("of another shape, and begun afresh", list(self.mismatched)),
        ):
            if names:
                told.append(f"  {len(names)} {what}: {_named(names)}")
        return told


def compare(source: str, there: Mapping[str, str], here: Mapping[str, str], init: InitConfig) -> StartingPoint:
    """What to take from a source whose tensors have these types and shapes; names by which both must agree."""
    patterns = init.only if isinstance(init.only, tuple) else (init.only,)
    chosen = [name for name in here if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        raise ConfigError(
            f"init.only={init.only!r} fits none of the {len(here)} names of the model: expected a pattern such as "
            f"{_named(list(here)[:3])}."
        )
    both = [name for name in chosen if name in there]
    mismatched = {name: f"{there[name]} there, {here[name]} here" for name in both if _differs(there, here, name)}
    found = StartingPoint(
        source,
        [name for name in both if name not in mismatched],
        [name for name in there if name not in both],
        [name for name in chosen if name not in there],
        mismatched,
    )
    if init.strict and (mismatched or found.missing):
        name, what = next(iter(mismatched.items()), (None, ""))
        if name is None:
            name, what = found.missing[0], "absent there"
        count = len(mismatched) + len(found.missing)
        raise ConfigError(
            f"init.from={init.source}: {name} is {what}{f', and {count - 1} more do not fit' if count > 1 else ''}. "
            "Set init.strict=false to begin with what fits, or init.only to the names that are meant."
        )
    if not found.loaded:
        raise ConfigError(
            f"init.from={init.source}: nothing in it fits the model. It holds {_named(list(there))}; the model has "
            f"{_named(chosen)}."
        )
    return found


def start_from(init: InitConfig, model: nn.Module, here: Mapping[str, str]) -> StartingPoint:
    """Put the weights of a run or a file into a model on any layout, `here` being the shape of the whole model."""
    source, weights = read_source(init)
    there = {name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for name, value in weights.items()}
    found = compare(source, there, here, init)
    own = set(model.state_dict())  # of a stage, its layers alone
    taken: dict[str, Any] = {name: weights[name] for name in found.loaded if name in own}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_model_state_dict(model, taken, options=StateDictOptions(full_state_dict=True, strict=False))
    return found


def read_source(init: InitConfig) -> tuple[str, Weights]:
    """The name of what `init.from` means, and its tensors."""
    path = Path(init.source)
    if path.is_file():
        return str(path), read_file(path)
    folder = find_folder(init)
    if any(name.endswith(".keras") for name in verify(folder).files):
        raise ConfigError(
            f"init.from={init.source} is a run of Keras or TensorFlow: expected one with framework=torch, or a file of "
            "safetensors or torch."
        )
    return str(folder), read_checkpoint(folder)


def find_folder(init: InitConfig) -> Path:
    """The checkpoint that `init.from` means: itself one, or one of a run."""
    path = Path(init.source)
    if (path / "manifest.json").is_file():
        return path
    try:
        return choose(path / "checkpoints", init.checkpoint)[0]
    except CheckpointError as error:
        raise ConfigError(f"init.from={init.source}: {error}") from None


def _differs(there: Mapping[str, str], here: Mapping[str, str], name: str) -> bool:
    """Whether shapes differ; types are converted."""
    return there[name].partition(" ")[2] != here[name].partition(" ")[2]


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
