"""Torch's profiler on one rank, and the sign to Nsight where there is a GPU."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_NSIGHT = "NSYS_PROFILING_SESSION_ID"  # set by nsys for what it starts


class Recorder:
    """Records what runs between start and stop."""

    def __init__(self, device: torch.device, memory: bool, stacks: bool) -> None:
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._on_gpu and _NSIGHT not in os.environ:  # a GPU tells of itself to one listener
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, profile_memory=memory, with_stack=stacks)

    def prepare(self) -> None:
        """What takes long before the first event; done a step ahead."""
        self._profiler.prepare_trace()

    def start(self) -> None:
        """Record from here, with nothing of the steps before left on the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        self._profiler.start_trace()

    def stop(self) -> None:
        """Record no more, when the GPU is through with all that was begun."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.stop_trace()
        if self._on_gpu:
            torch.cuda.profiler.stop()

    def write(self, path: Path) -> None:
        """What was recorded, as a file of Trace Event JSON, packed."""
        self._profiler.export_chrome_trace(str(path))
