"""A trace of some steps by TensorFlow's profiler, for TensorBoard."""

from pathlib import Path


class Profile:
    """Traces the steps from a first to a last one, counted from 1, into a folder; without them it does nothing."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self.folder = folder
        self._steps = steps
        self._runs = False

    def before(self, step: int) -> None:
        """Begin where the first step comes, or a later one that the run goes on from."""
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._runs:
            import tensorflow as tf

            tf.profiler.experimental.start(str(self.folder))
            self._runs = True

    def after(self, step: int) -> bool:
        """End after the last step; whether a trace was written."""
        if not (self._runs and self._steps and step >= self._steps[1]):
            return False
        self.close()
        return True

    def close(self) -> None:
        if self._runs:
            import tensorflow as tf

            tf.profiler.experimental.stop()
            self._runs = False
