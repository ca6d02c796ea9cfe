"""The learner of torch: what one step does to the weights of a model, what is measured and what is saved."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tutti.checkpoint import store
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schema import InitConfig
from tutti.data.dataset import find_part, tensors_in
from tutti.data.loader import RankBatch, evaluation_batches, same_number
from tutti.parallel.batch_statistics import BatchStatistics
from tutti.parallel.ddp import without_sync, wrap_model
from tutti.parallel.dropout import DropoutMasks
from tutti.parallel.mesh import Mesh
from tutti.ranks.device import DTYPES, applies, seed_pass
from tutti.ranks.group import Group
from tutti.runs.step_parts import StepPart
from tutti.train.metrics import Meter, Metrics, count_samples
from tutti.train.timing import make_timer
from tutti.units import EMA

if TYPE_CHECKING:
    from tutti.checkpoint.weights import StartingPoint
    from tutti.parallel.gradient_noise import GradientSquares
    from tutti.parallel.space.mode import SpaceMode

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
    """A model and its loss in one module, so that a compiler sees both; with `space`, of parts of samples."""

    def __init__(
        self, model: nn.Module, criterion: Callable[[Any, Any], torch.Tensor], space: "SpaceMode | None" = None
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self._space = space

    def forward(self, inputs: Any, targets: Any) -> tuple[Any, torch.Tensor]:
        outputs = self.model(inputs) if self._space is None else self._space.run(self.model, inputs)
        loss = self.criterion(outputs, targets)  # for a gradient of outputs, a compiled backward pass would add zeros
        return outputs.detach() if isinstance(outputs, torch.Tensor) else outputs, loss


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of a recipe, for forward passes."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


Silence = Callable[[], AbstractContextManager[None]]


class TorchLearner:
    """A model of torch with its loss, its metrics and its optimizer, and what they need to step on all ranks."""

    reports_phases = True
    stages: tuple[str, ...] = ()  # the layers of each stage, where the model is in stages

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        group: Group,
        mesh: Mesh,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        at: Callable[[StepPart, int], None] = lambda *_: None,
        space: "SpaceMode | None" = None,
    ) -> None:
        device = mesh.device
        self.names = ("loss", *metrics)
        self.runs_ahead = device.type == "cuda"
        self.timer = make_timer(device, config.log)
        self._at = at  # is called where a phase of a step begins
        self._step = 0  # the step that is made, counted from 1
        self._metrics = metrics
        self._share = 1 / (mesh.layout.parts * mesh.layout.tensor)  # of the ranks that measure a sample
        self._window = Meter(metrics, device, self._share)
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.statistics = BatchStatistics(model, plan.passes, mesh)
        # The compiler cannot follow what counts calls into a layer that is computed again.
        compiled_again = applies(config.speed.compile, device) and config.parallel.recompute != "none"
        self.masks = DropoutMasks(model, device, counts=not compiled_again, space=space)
        self._space = space
        self._pass = Pass(model, criterion, space)
        self._squares = self._make_squares(config, group)
        self._meets = False  # whether the pass under way averages gradients over ranks
        self._spread_pass, self._silence = self._spread(config, group, mesh)
        self._channels_last = applies(config.speed.channels_last, device)
        self._ema = None
        if config.ema:
            from tutti.train.ema import AveragedWeights

            self._ema = AveragedWeights(model, config.ema.decay, mesh)
        self._graphs = False
        if applies(config.speed.compile, device):
            self._graphs = applies(config.speed.graphs, device)
            if mesh.layout.splits_weights:  # model and loss are not one graph then
                self._pass.criterion = torch.compile(self._pass.criterion, dynamic=False)
            if compile_updates := getattr(optimizer, "compile", None):
                compile_updates()
            for each in self._compiled(mesh):
                each.compile(dynamic=False, mode="reduce-overhead" if self._graphs else None)
        self._config = config
        self._plan = plan
        self._mesh = mesh
        self._device = device

    def _spread(self, config: RunConfig, group: Group, mesh: Mesh) -> tuple[nn.Module, Silence]:
        """The forward pass whose backward pass averages gradients over ranks, and what keeps them on this rank."""
        if mesh.layout.uses_fsdp:
            from tutti.parallel.shard import without_reduction

            return self._pass, without_reduction(self.model)
        if mesh.layout.tensor > 1:  # of one copy
            return self._pass, nullcontext
        on_bucket = self._squares.add_bucket if self._squares else None
        spread = wrap_model(self._pass, config.ddp, group, mesh.device, self._all_gradients_there, on_bucket)
        return spread, without_sync(spread)

    def _compiled(self, mesh: Mesh) -> Iterable[nn.Module]:
        """What is compiled, each for itself."""
        if not mesh.layout.splits_weights:
            return [self._pass]
        from tutti.parallel.shard import find_compiled

        return find_compiled(self.model)

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """The bytes that ranks average in a step, in however many passes."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        if self._mesh.layout.tensor > 1:
            from tutti.parallel.tensor import held_bytes

            return sum(held_bytes(each) for each in trained)
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
            self._seed_pass(batch, index)
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
                self._window.add_metrics(*self._whole(inputs, outputs, targets), self._plan.micro_batch)
        self.statistics.after_step()
        if squares:
            squares.end_step(self._step)
        return torch.stack(losses).mean() if passes > 1 else losses[0]

    def _seed_pass(self, batch: RankBatch, index: int) -> None:
        """Set what the random numbers of a micro-batch depend on, before its forward pass, and where it is repeated."""
        micro_batch = self._mesh.data_rank * self._plan.passes + index
        seed_pass(self._device, self._config.seed, batch.step, micro_batch)
        self.masks.begin_pass(self._config.seed, batch.step, micro_batch)

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
        if self._ema:
            self._ema.update()
        self.timer.ended(StepPart.OPTIMIZER)

    def dry_run(self, batch: RankBatch) -> tuple[float, float]:
        """Make a step and keep nothing of it; the sum of its loss over this rank's samples, and their number.

        DDP settles its buckets in its first backward pass. Done aside, it leaves a resumed run to add up gradients
        in the same order as a run that was never stopped.
        """
        window, self._window = self._window, Meter(self._metrics, self._device, self._share)
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

    def take_totals(self) -> Callable[[], torch.Tensor]:
        """Set the totals to zero; returns a function that gives what they were, and waits for a GPU."""
        return self._window.take()

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
        meter = Meter(self._metrics, self._device, self._share)
        size = self._config.batch.eval or self._plan.micro_batch
        for (inputs, targets), counts in self._evaluation_batches(data, group, size):
            samples = count_samples(targets)
            outputs, loss = self._predict(inputs, targets, is_full=samples == size)
            outputs, targets = self._whole(inputs, outputs, targets)
            if counts and loss is not None:
                meter.add_loss(loss, samples)
                meter.add_metrics(outputs, targets, samples)
            if not self._all_go_on(goes_on, group):
                break
        self.model.train()
        return meter.totals()

    def _evaluation_batches(self, data: Any, group: Group, size: int) -> Iterator[tuple[Any, bool]]:
        """This rank's evaluation batches, and whether they count; where ranks compute together, as many on each."""
        mesh, workers, seed = self._mesh, self._config.data.workers, self._config.seed
        ranks = mesh.layout.data_ranks
        part = find_part(mesh.layout, mesh.rank)
        batches = evaluation_batches(data, mesh.data_rank, ranks, size, self._device, workers, seed, part)
        if mesh.layout.is_data_parallel:
            return ((batch, True) for batch in batches)
        spare = next(evaluation_batches(data, 0, len(data), 1, self._device, 0, seed, part))
        return same_number(batches, lambda has: group.sum(torch.tensor([float(has)])).item() > 0, spare)

    def _whole(self, inputs: Any, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Outputs and targets of whole samples, for metrics; every rank that shares the samples enters."""
        if self._space is None or not self._space.gives_parts or not self._metrics:
            return outputs, targets
        cells = next(tensors_in(inputs)).shape[2:]
        with torch.no_grad():
            return self._space.gather(outputs, cells), self._space.gather(targets, cells)

    def _all_go_on(self, goes_on: Callable[[], bool], group: Group) -> bool:
        """Whether validation goes on; ranks that compute together end together."""
        own = goes_on()
        if self._mesh.layout.is_data_parallel:
            return own
        return group.sum(torch.tensor([float(own)])).item() == group.world_size

    def combine_ranks(self, group: Group) -> None:
        """Average the statistics of batch norm over ranks; every rank enters."""
        self.statistics.combine_ranks()
        if self._ema:
            self._ema.combine_ranks()

    def evaluated(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """The weights that are evaluated, by what their metrics end with: the trained ones, then their averages."""
        yield "", nullcontext()
        if self._ema:
            yield EMA, self._ema.in_use()

    # What is saved.

    def shape(self) -> dict[str, str]:
        """The names, types and shapes of what the model saves."""
        return store.model_shape(self.model)

    def write(self, folder: Path, group: Group) -> list[Path]:
        """Write the model and the optimizer from all ranks."""
        return store.write_state(folder, self.model, self.optimizer, group, averages=self._ema_state())

    def load_weights(self, folder: Path, averages: bool = False) -> None:
        """Read the model alone from a verified checkpoint, or its averaged weights; every rank enters."""
        from tutti.checkpoint.weights import load_model

        load_model(folder, self.model, averages)

    def start_from(self, init: InitConfig) -> "StartingPoint":
        """Begin with weights of another run or of a file, the same on every layout."""
        from tutti.checkpoint.weights import start_from

        return start_from(init, self.model, self.shape())

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a checkpoint into the model, the optimizer and the scaler of gradients."""
        if self._mesh.layout.splits_weights:
            store.check_optimizer(folder, self.model, self.optimizer, self._config.optim.name)
        store.load_state(folder, self.model, self.optimizer, self._ema_state())
        self.scaler.load_state_dict(progress["scaler"])

    def _ema_state(self) -> dict[str, torch.Tensor]:
        return self._ema.state if self._ema else {}

    def progress(self) -> dict[str, Any]:
        """The state of the scaler of gradients."""
        return {"scaler": self.scaler.state_dict()}

    def _predict(self, inputs: Any, targets: Any, is_full: bool) -> tuple[Any, torch.Tensor | None]:
        """Outputs and loss of an evaluation batch, if this rank has them; a ragged one is not worth compiling for."""
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
        return autocast(self._config.precision, self._device)
