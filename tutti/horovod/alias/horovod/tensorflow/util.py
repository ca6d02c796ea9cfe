"""Small questions that test suites ask."""

from tutti.horovod.tensorflow.bridge import executing_eagerly as _executing_eagerly

__all__ = ["_executing_eagerly"]
