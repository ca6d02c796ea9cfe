"""Checks that the framework of a recipe has the parts and settings that the recipe names."""

from importlib.util import find_spec

from tutti.config import parts
from tutti.config.run import RunConfig
from tutti.config.schema import Section
from tutti.errors import ConfigError

_PACKAGES = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}  # by the backend of Keras
# Keras uses the channels-last format in any case, so that this setting is accepted.
_ACCEPTED = {"speed.channels_last": (True, "gpu")}


def keras_backend(config: RunConfig) -> str:
    """The backend of Keras in a run."""
    return config.backend or "tensorflow"


def check_framework(config: RunConfig) -> None:
    """Refuse parts and settings that the framework of a recipe does not have, and name those it has."""
    if config.framework == "torch":
        _refuse_with_torch(config)
        return
    if config.framework == "tensorflow" and keras_backend(config) != "tensorflow":
        raise ConfigError(
            f"backend={config.backend!r} with framework=tensorflow: expected tensorflow. "
            "Leave backend out, or set framework=keras."
        )
    _check_parts(config)
    _check_options(config)


def check_installed(config: RunConfig) -> None:
    """Refuse a framework that is not installed, with the command that installs it."""
    if config.framework == "torch":
        return
    backend = keras_backend(config)
    for package in ("keras", _PACKAGES[backend]):
        if find_spec(package) is None:
            extra = "tensorflow" if backend == "tensorflow" else "keras"
            line = f"pip install 'tutti-train[{extra}]'" + (" jax" if package == "jax" else "")
            chosen = f"framework={config.framework}" + (f" backend={backend}" if config.framework == "keras" else "")
            raise ConfigError(f"{chosen} needs the package {package}, which is not installed. Install it: {line}")


def _refuse_with_torch(config: RunConfig) -> None:
    if config.backend is not None:
        raise ConfigError(
            f"backend={config.backend!r} with framework=torch: only Keras has backends. "
            "Set framework=keras, or leave backend out."
        )
    if config.optim.name.startswith(("keras.", "tensorflow.")):
        raise ConfigError(
            f"optim.name={config.optim.name!r} with framework=torch: expected an optimizer of torch, for example "
            "torch.optim:RMSprop. Choose one, or set framework=keras."
        )
    if config.log.profile is not None:
        raise ConfigError(
            f"log.profile={list(config.log.profile)} with framework=torch: the profiler is TensorFlow's. "
            "Set framework=tensorflow, or leave log.profile out."
        )
    if config.step is not None:
        _refuse_with_step(config, f"step={config.step.name}")


def _refuse_with_step(config: RunConfig, step: str) -> None:
    """Refuse what only steps of tutti's own do, with how the function does it."""
    refused: dict[str, tuple[object, str]] = {}
    for name, section, instead in (
        ("parallel", config.parallel, "every rank holds whole models"),
        ("ddp", config.ddp, "run.backward averages gradients"),
    ):
        usual = _defaults(section)
        refused |= {f"{name}.{key}": (value, instead) for key, value in section if value != usual[key]}
    if config.batch.micro is not None:
        refused["batch.micro"] = config.batch.micro, "the function gets the whole batch of its rank, and may split it"
    if config.precision != "fp32":
        refused["precision"] = config.precision, "the function chooses it with torch.autocast"
    if config.optim.clip_norm is not None:
        instead = "the function clips with torch.nn.utils.clip_grad_norm_ after run.backward"
        refused["optim.clip_norm"] = config.optim.clip_norm, instead
    if config.speed.compile:
        refused["speed.compile"] = config.speed.compile, "call compile() of each model where it is made"
    if config.log.noise_scale:
        refused["log.noise_scale"] = "true", "only the function knows the gradients of its step"
    for key, (value, instead) in refused.items():
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(f"{key}={shown} with {step}: {instead}. Leave {key} out, or leave step out.")


def _check_parts(config: RunConfig) -> None:
    for section in parts.SECTIONS:
        part: parts.PartOptions = getattr(config, section)
        if config.framework not in part.frameworks():
            there = ", ".join(parts.names_in(section, config.framework))
            of_keras = ", or one of Keras as keras.optimizers:RMSprop," if section == "optim" else ","
            raise ConfigError(
                f"{section}.name={part.name!r} does not exist in framework={config.framework}: expected {there}. "
                f"Choose one of them{of_keras} or set framework=torch."
            )
    for name in config.metrics:
        if name not in parts.METRICS:
            raise ConfigError(
                f"metrics={list(config.metrics)}: {name!r} does not exist in framework={config.framework}: expected "
                f"{', '.join(parts.METRICS)}. Leave it out, or set framework=torch."
            )


def _check_options(config: RunConfig) -> None:
    framework = f"framework={config.framework}"
    if config.batch.micro is not None:
        raise ConfigError(
            f"batch.micro={config.batch.micro} with {framework}, which takes a rank's share of a batch in one pass. "
            "Set batch.micro=null, or framework=torch."
        )
    for name, section in (("speed", config.speed), ("ddp", config.ddp), ("parallel", config.parallel)):
        for key, default in _defaults(section).items():
            given, full = getattr(section, key), f"{name}.{key}"
            if given not in (default, *_ACCEPTED.get(full, ())):
                shown = "null" if default is None else str(default).lower()
                raise ConfigError(
                    f"{full}={given!r} with {framework}: a setting of torch. Set {full}={shown}, or framework=torch."
                )
    if config.ema is not None:
        raise ConfigError(
            f"ema.decay={config.ema.decay:g} with {framework}: averaged weights exist in torch. "
            "Leave ema out, or set framework=torch."
        )
    if config.step is not None:
        raise ConfigError(
            f"step={config.step.name} with {framework}: steps of your own exist in torch. "
            "Leave step out, or set framework=torch."
        )
    backend = keras_backend(config)
    if config.log.profile is not None and backend != "tensorflow":
        raise ConfigError(
            f"log.profile={list(config.log.profile)} with backend={backend}: the profiler is TensorFlow's. "
            "Set backend=tensorflow, or leave log.profile out."
        )
    if config.runtime.deterministic and backend == "jax":
        raise ConfigError(
            "runtime.deterministic=true with backend=jax, which has no such switch. "
            "Leave it out, or choose another backend."
        )


def _defaults(section: Section) -> dict[str, object]:
    return {name: field.default for name, field in type(section).model_fields.items()}
