"""The learner of a model that is cut into stages: each rank trains its layers, and micro-batches pass through all."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.checkpoint import store
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import Loader, RankBatch
from tutti.data.order import make_order
from tutti.optim.optimizers import build_optimizer, hidden_weights
from tutti.parallel.batch_statistics import BatchStatistics
from tutti.parallel.chain import Layer, measure_chain
from tutti.parallel.mesh import Mesh
from tutti.parallel.stages import Pipeline
from tutti.ranks.device import applies
from tutti.ranks.group import Group
from tutti.runs.step_parts import StepPart
from tutti.train.build import agreed
from tutti.train.learner import TorchLearner, autocast, channels_last
from tutti.train.metrics import Metrics


def build_staged_learner(
    config: RunConfig,
    plan: Plan,
    group: Group,
    mesh: Mesh,
    model: nn.Module,
    criterion: Callable[[Any, Any], torch.Tensor],
    metrics: Metrics,
    data: Any,
    at: Callable[[StepPart, int], None],
) -> "StagedLearner":
    """Cut a whole model, as rank 0 has measured it, and leave this rank its part; every rank enters."""
    measure = functools.partial(_measure, config, plan, mesh.device, model, data)
    found = agreed(group, lambda: measure() if group.is_first else None)
    inputs, layers = group.from_first(found)
    shape, parameters = store.model_shape(model), sum(each.numel() for each in model.parameters())
    hidden = hidden_weights(config.optim, model)
    pipeline = Pipeline(model, [Layer(**each) for each in layers], [inputs], mesh, config.parallel)
    optimizer = build_optimizer(config.optim, model, hidden)
    learner = StagedLearner(config, plan, group, mesh, model, criterion, optimizer, metrics, at)
    learner.begin(pipeline, shape, parameters)
    return learner


def _measure(
    config: RunConfig, plan: Plan, device: torch.device, model: nn.Module, data: Any
) -> tuple[tuple[str, list[int]], list[Layer]]:
    """The type and shape of a micro-batch, and what the modules of a model make of it."""
    batches = Loader(data, plan, make_order(config, plan, data), 0, device, 0, 0).steps(0)
    inputs, _ = next(batches).micro_batches[0]
    if applies(config.speed.channels_last, device):
        inputs = channels_last(inputs)
    layers = measure_chain(model, inputs, device, functools.partial(autocast, config.precision, device))
    return (str(inputs.dtype), list(inputs.shape)), layers


class StagedLearner(TorchLearner):
    """A learner whose model is cut into stages; losses and metrics are known to the rank with the last."""

    def begin(self, pipeline: Pipeline, shape: dict[str, str], parameters: int) -> None:
        """Take the parts of this rank, and what is known of the whole model; every rank enters."""
        self.pipeline, self._shape, self._parameters = pipeline, shape, parameters
        mesh = self._mesh
        _ = mesh.copies  # made here, where every rank enters
        passes, self.stages = self._plan.passes, pipeline.describe()
        self._statistics = {part: BatchStatistics(each, passes, mesh) for part, each in pipeline.parts.items()}
        self._averages = True  # gradients, over data ranks
        self._batch: RankBatch | None = None
        self._losses: list[torch.Tensor] = []
        self._measures = False
        pipeline.prepare(passes, self._loss, self._around_forward, self._around_backward)
        if applies(self._config.speed.compile, self._device):
            for each in pipeline.parts.values():
                each.compile(dynamic=False)

    def _spread(self, config: RunConfig, group: Group, mesh: Mesh) -> tuple[nn.Module, Any]:
        return self._pass, self._without_averages

    def _compiled(self, mesh: Mesh) -> Iterable[nn.Module]:
        return ()

    @property
    def parameters(self) -> int:
        """The number of the whole model's parameters."""
        return self._parameters

    # A step.

    def forward_backward(self, batch: RankBatch, measure: bool) -> torch.Tensor:
        """Gradients of the mean loss over the global batch; zero is returned where another rank has the loss."""
        self._step, self._batch, self._measures = batch.step + 1, batch, measure
        self._losses = []
        self.scaler.scale(torch.zeros((), device=self._device))  # makes the scale, also where no loss is
        self._at(StepPart.FORWARD, self._step)
        self.pipeline.step([self._laid_out(inputs) for inputs, _ in batch.micro_batches])
        for statistics in self._statistics.values():
            statistics.after_step()
        self._average()
        self.timer.ended(StepPart.COMMUNICATION)
        self._batch = None
        return torch.stack(self._losses).mean() if self._losses else torch.zeros((), device=self._device)

    def _loss(self, outputs: Any, index: int) -> torch.Tensor:
        """The loss of a micro-batch, scaled as its gradient is to be."""
        assert self._batch is not None
        targets, samples = self._batch.micro_batches[index][1], self._plan.micro_batch
        with self._autocast():
            loss = self.criterion(outputs, targets)
        self._losses.append(loss.detach())
        self._window.add_loss(loss, samples)
        if self._measures:
            self._window.add_metrics(outputs.detach(), targets, samples)
        scaled = self.scaler.scale(loss / self._plan.passes)
        self.timer.ended(StepPart.FORWARD)
        return scaled

    @contextmanager
    def _around_forward(self, part: int, index: int) -> Iterator[None]:
        self.timer.ended(StepPart.COMMUNICATION)  # until here this rank has waited for another
        self._at(StepPart.FORWARD, self._step)
        self._seed(index)
        self._statistics[part].before_pass(index)
        with self._autocast():
            yield
        self.timer.ended(StepPart.FORWARD)

    @contextmanager
    def _around_backward(self, part: int, index: int) -> Iterator[None]:
        self.timer.ended(StepPart.COMMUNICATION)
        self._at(StepPart.BACKWARD, self._step)
        self._seed(index)
        yield
        self.timer.ended(StepPart.BACKWARD)

    def _seed(self, index: int) -> None:
        """Set what random numbers of a micro-batch depend on; a backward pass may compute activations again."""
        assert self._batch is not None
        self._seed_pass(self._batch, index)

    def _average(self) -> None:
        """Average gradients over the ranks with the same layers."""
        copies = self._mesh.layout.copies
        if copies == 1 or not self._averages:
            return
        gradients = self._gradients()
        flat = torch.cat([each.reshape(-1) for each in gradients])
        dist.all_reduce(flat, group=self._mesh.copies)
        flat /= copies
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self.model.parameters() if each.grad is not None]

    def clip_gradients(self) -> None:
        """Shorten the gradient of the whole model to the recipe's norm, if it sets one."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
            for found in self.scaler._found_inf_per_device(self.optimizer).values():  # all stages skip a step, or none
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.pipeline.group)
        most = self._config.optim.clip_norm
        if most is None:
            return
        squared = nn.utils.get_total_norm(self._gradients()).square()
        dist.all_reduce(squared, group=self.pipeline.group)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, squared.sqrt())

    @contextmanager
    def _without_averages(self) -> Iterator[None]:
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    # What is measured and saved.

    def _predict(self, inputs: Any, targets: Any, is_full: bool) -> tuple[Any, torch.Tensor | None]:
        """Outputs and loss on the rank with the last stage, None on the others."""
        outputs = self.pipeline.predict(self._laid_out(inputs), self._autocast)
        if outputs is None:
            return None, None
        with self._autocast():
            return outputs, self.criterion(outputs, targets)

    def combine_ranks(self, group: Group) -> None:
        """Average the statistics of batch norm over ranks; every rank enters."""
        for statistics in self._statistics.values():
            statistics.combine_ranks()

    def shape(self) -> dict[str, str]:
        """The names, types and shapes of what the stages save together."""
        return self._shape

    def write(self, folder: Path, group: Group) -> list[Path]:
        """Write the model and the optimizer from all ranks, each its layers."""
        return store.write_state(folder, self.model, self.optimizer, group, in_stages=True)
