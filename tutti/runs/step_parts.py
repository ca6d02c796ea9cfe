"""The parts of a training step: one word for each, in training, benchmarks, traces, studies and hang reports."""

from enum import StrEnum


class StepPart(StrEnum):
    """What a rank spends the time of a step on: a value is the word for it; those with a place come in its order."""

    DATA = "data loading"  # waiting for the batch
    FORWARD = "forward"
    BACKWARD = "backward"  # until the last gradient is there
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    COMMUNICATION = "communication"  # exposed: from the last gradient to its mean over ranks
    COMPUTE = "compute"  # forward, backward and optimizer together
    STRAGGLER = "straggler"  # waiting for a rank that is slower than the others
    OTHER = "other"  # what no part covers

    @property
    def order(self) -> int:
        """The place in a step, and the number in hang.json."""
        return _ORDER[self]

    @property
    def key(self) -> str:
        """The name in metrics.jsonl and bench.json: `data` of `data_seconds`."""
        return _KEYS.get(self, self.value)

    @property
    def share_key(self) -> str:
        """The name of the share of a step in points.csv: `reading` of `reading_share`."""
        return _SHARE_KEYS.get(self, self.value)


TIMED: tuple[StepPart, ...] = (  # by the timers of training
    StepPart.DATA,
    StepPart.FORWARD,
    StepPart.BACKWARD,
    StepPart.COMMUNICATION,
    StepPart.OPTIMIZER,
)
SHARES: tuple[StepPart, ...] = (  # of a step; together they are all of it
    StepPart.DATA,
    StepPart.COMPUTE,
    StepPart.COMMUNICATION,
    StepPart.STRAGGLER,
    StepPart.OTHER,
)
COMPUTE: tuple[StepPart, ...] = (StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)
_ORDER = {part: place for place, part in enumerate(StepPart)}
_KEYS = {
    StepPart.DATA: "data",
    StepPart.OPTIMIZER: "update",
    StepPart.STRAGGLER: "waiting",
    StepPart.OTHER: "rest",
}
_SHARE_KEYS = {
    StepPart.DATA: "reading",
    StepPart.COMPUTE: "computing",
    StepPart.STRAGGLER: "waiting",
    StepPart.OTHER: "rest",
}
