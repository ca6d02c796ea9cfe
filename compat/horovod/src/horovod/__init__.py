"""The package horovod, by tutti: tutti.horovod.alias makes its modules."""

try:
    from tutti.horovod.alias import define_package, other_horovod
except ImportError as error:
    raise ImportError(
        "tutti-horovod needs a newer tutti, which has tutti.horovod.alias: pip install --upgrade tutti-train"
    ) from error

if _other := other_horovod():
    raise ImportError(
        f"horovod {_other} and tutti-horovod are both installed, and both provide the package horovod: expected one. "
        "To keep tutti's: pip uninstall horovod && pip install --force-reinstall --no-deps tutti-horovod. "
        "To keep Horovod's: pip uninstall tutti-horovod && pip install --force-reinstall --no-deps horovod."
    )
define_package(__name__)
