"""The learner of torch: what one step does to the weights of a model, what is measured and what is saved."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tutti.checkpoint import store
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import RankBatch, evaluation_batches
from tutti.parallel.batch_statistics import BatchStatistics
from tutti.parallel.ddp import without_sync, wrap_model
from tutti.ranks.device import applies, seed_pass
from tutti.ranks.group import Group
from tutti.runs.step_parts import StepPart
from tutti.train.metrics import Meter, Metrics, count_samples
from tutti.train.timing import make_timer

if TYPE_CHECKING:
    from tutti.parallel.gradient_noise import GradientSquares

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def put_channels_last(model: nn.Module) -> None:
    """Lay out the weights of a model for images in the channels-last layout."""
    for parameter in model.parameters():
        parameter.data = channels_last(parameter.data)


def channels_last(batch: Any) -> Any:
    """A batch of images or volumes in the channels-last layout; anything else as it is."""
    if isinstance(batch, torch.Tensor) and batch.ndim in _FORMATS:
        # Not contiguous(): with one channel it takes both layouts for the same, and convolutions then choose the other.
        return batch.to(memory_format=_FORMATS[batch.ndim])
    return batch


class Pass(nn.Module):
    """A model and its loss in one module, so that a compiler sees both."""

    def __init__(self, model: nn.Module, criterion: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, inputs: Any, targets: Any) -> tuple[Any, torch.Tensor]:
        outputs = self.model(inputs)
        return outputs, self.criterion(outputs, targets)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchLearner:
    """A model of torch with its loss, its metrics and its optimizer, and what they need to step on all ranks."""

    reports_phases = True

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        group: Group,
        device: torch.device,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        at: Callable[[StepPart, int], None] = lambda *_: None,
    ) -> None:
        self.names = ("loss", *metrics)
        self.timer = make_timer(device, config.log)
        self._at = at  # is called where a phase of a step begins
        self._step = 0  # the step that is made, counted from 1
        self._metrics = metrics
        self._window = Meter(metrics, device)
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.statistics = BatchStatistics(model, plan.passes, plan.world_size)
        self._pass = Pass(model, criterion)
        self._squares = self._make_squares(config, group)
        on_bucket = self._squares.add_bucket if self._squares else None
        self._spread_pass = wrap_model(self._pass, config.ddp, group, device, self._all_gradients_there, on_bucket)
        self._meets = False  # whether the pass under way averages gradients over ranks
        self._silence = without_sync(self._spread_pass)
        self._channels_last = applies(config.speed.channels_last, device)
        self._graphs = False
        if applies(config.speed.compile, device):
            self._graphs = applies(config.speed.graphs, device)
            self._pass.compile(dynamic=False, mode="reduce-overhead" if self._graphs else None)
        self._config = config
        self._plan = plan
        self._rank = group.rank
        self._device = device

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """The bytes that ranks average in a step, in however many passes."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        return sum(each.nbytes for each in trained) if self._config.ddp.communicate else 0

    # A step.

    def forward_backward(self, batch: RankBatch, measure: bool) -> torch.Tensor:
        """Gradients of the mean loss over the global batch, one pass for each micro-batch of this rank."""
        passes = len(batch.micro_batches)
        self._step = batch.step + 1
        squares, losses = self._squares, []
        if squares:
            squares.begin_step(self._step)
        for index, (inputs, targets) in enumerate(batch.micro_batches):
            seed_pass(self._device, self._config.seed, batch.step, self._rank * passes + index)
            self.statistics.before_pass(index)
            with self._silence() if index < passes - 1 else nullcontext():  # ranks meet in the last pass
                self._at(StepPart.FORWARD, self._step)
                with self._autocast():
                    outputs, loss = self._spread_pass(self._laid_out(inputs), targets)
                self.timer.ended(StepPart.FORWARD)
                self._at(StepPart.BACKWARD, self._step)
                if squares:
                    squares.begin_pass()
                if self._graphs:  # the next pass writes over what this one gave
                    outputs, loss = outputs.clone() if measure else outputs, loss.clone()
                self.scaler.scale(loss / passes if passes > 1 else loss).backward()
                self.timer.ended(StepPart.COMMUNICATION if self._meets else StepPart.BACKWARD)
                self._meets = False
                if squares:
                    squares.end_pass()
            losses.append(loss.detach())
            self._window.add_loss(loss, self._plan.micro_batch)
            if measure:
                self._window.add_metrics(outputs, targets, self._plan.micro_batch)
        self.statistics.after_step()
        if squares:
            squares.end_step(self._step)
        return torch.stack(losses).mean() if passes > 1 else losses[0]

    def clip_gradients(self) -> None:
        """Shorten the gradient to the recipe's norm, if it sets one."""
        if self._config.optim.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optim.clip_norm)

    def update_weights(self, lr: float) -> None:
        """One step of the optimizer at the given rate."""
        self._at(StepPart.OPTIMIZER, self._step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.timer.ended(StepPart.OPTIMIZER)

    def dry_run(self, batch: RankBatch) -> tuple[float, float]:
        """Make a step and keep nothing of it; the sum of its loss over this rank's samples, and their number.

        DDP settles its buckets in its first backward pass. Done aside, it leaves a resumed run to add up gradients
        in the same order as a run that was never stopped.
        """
        window, self._window = self._window, Meter(self._metrics, self._device)
        squares, self._squares = self._squares, None
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.model.train()
        try:
            self.forward_backward(batch, measure=False)
            totals = self._window.totals().tolist()
        finally:
            self._window, self._squares = window, squares
            self.optimizer.zero_grad()
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
        return totals[0], totals[len(self.names)]

    # What is measured.

    def totals(self) -> torch.Tensor:
        """The totals of the training steps since they were cleared; waits until a GPU has computed them."""
        return self._window.totals()

    def clear_totals(self) -> None:
        """Set the totals to zero."""
        self._window.clear()

    def put_totals(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and zeros elsewhere."""
        self._window.put(totals, is_first)

    def take_squares(self) -> dict[int, list[float]]:
        """The squared gradient of this rank's part of a batch and of all of it, by step, since they were taken."""
        return self._squares.take() if self._squares else {}

    @property
    def biases(self) -> tuple[str, ...]:
        """What in the model biases the gradient noise scale."""
        from tutti.parallel.gradient_noise import find_biases

        return find_biases(self.model)

    @torch.no_grad()
    def evaluate(self, data: Any, group: Group, goes_on: Callable[[], bool]) -> torch.Tensor:
        """The totals of this rank's part of a dataset, to its end or while it goes on; a sample is on one rank."""
        self.model.eval()
        meter = Meter(self._metrics, self._device)
        per_rank_batch = self._config.batch.eval or self._plan.micro_batch
        workers, seed = self._config.data.workers, self._config.seed
        for inputs, targets in evaluation_batches(
            data, group.rank, group.world_size, per_rank_batch, self._device, workers, seed
        ):
            samples = count_samples(targets)
            outputs, loss = self._predict(inputs, targets, is_full=samples == per_rank_batch)
            meter.add_loss(loss, samples)
            meter.add_metrics(outputs, targets, samples)
            if not goes_on():
                break
        self.model.train()
        return meter.totals()

    def combine_ranks(self, group: Group) -> None:
        """Average the statistics of batch norm over ranks; every rank enters."""
        self.statistics.combine_ranks()

    # What is saved.

    def shape(self) -> dict[str, str]:
        """The names, types and shapes of what the model saves."""
        return store.model_shape(self.model)

    def write(self, folder: Path, group: Group) -> list[Path]:
        """Write the model and the optimizer from all ranks."""
        return store.write_state(folder, self.model, self.optimizer, group)

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a checkpoint into the model, the optimizer and the scaler of gradients."""
        store.load_state(folder, self.model, self.optimizer)
        self.scaler.load_state_dict(progress["scaler"])

    def progress(self) -> dict[str, Any]:
        """The state of the scaler of gradients."""
        return {"scaler": self.scaler.state_dict()}

    def _predict(self, inputs: Any, targets: Any, is_full: bool) -> tuple[Any, torch.Tensor]:
        """Outputs and loss of an evaluation batch; a ragged one is not worth compiling for."""
        forward = self._pass if is_full else self._pass.forward
        with self._autocast():
            return forward(self._laid_out(inputs), targets)

    def silent(self) -> AbstractContextManager[None]:
        """Steps whose gradients stay on this rank."""
        return self._silence()

    def _make_squares(self, config: RunConfig, group: Group) -> "GradientSquares | None":
        """What measures the gradient noise scale, if the recipe has it measured."""
        if not config.log.noise_scale:
            return None
        from tutti.parallel.gradient_noise import GradientSquares

        return GradientSquares(self._pass.parameters(), self.scaler, group.world_size)

    def _all_gradients_there(self) -> None:
        self.timer.ended(StepPart.BACKWARD)
        self._meets = True

    def _laid_out(self, inputs: Any) -> Any:
        """Inputs in the memory layout of the recipe."""
        return channels_last(inputs) if self._channels_last else inputs

    def _autocast(self) -> AbstractContextManager[Any]:
        """The precision of the recipe, for forward passes."""
        dtype = _DTYPES.get(self._config.precision)
        return torch.autocast(self._device.type, dtype) if dtype else nullcontext()
