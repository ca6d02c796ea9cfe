"""The package `horovod` for a process that has this folder on `sys.path`; tutti.horovod.alias makes its modules."""

from tutti.horovod.alias import define_package

define_package(__name__)
