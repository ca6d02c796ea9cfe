"""What one step does to the weights of a model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import RankBatch
from tutti.models.layout import channels_last
from tutti.parallel.batch_statistics import BatchStatistics
from tutti.parallel.ddp import silence, spread
from tutti.ranks.device import applies
from tutti.ranks.group import Group
from tutti.ranks.seeds import seed_pass
from tutti.runs.step_parts import StepPart
from tutti.train.meters import Meter
from tutti.train.phases import make_timer


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


class Learner:
    """A model with its loss, its optimizer and what they need to step together on all ranks."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        group: Group,
        device: torch.device,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        at: Callable[[StepPart, int], None] = lambda *_: None,
    ) -> None:
        self.timer = make_timer(device, config.log)
        self._at = at  # who is told where a step is
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.statistics = BatchStatistics(model, plan.passes, plan.world_size)
        self._pass = Pass(model, criterion)
        self._spread_pass = spread(self._pass, config.ddp, group, device, self._all_gradients_there)
        self._meets = False  # whether the pass under way averages gradients over ranks
        self._silence = silence(self._spread_pass)
        self._channels_last = applies(config.speed.channels_last, device)
        self._graphs = False
        if applies(config.speed.compile, device):
            self._graphs = applies(config.speed.graphs, device)
            self._pass.compile(dynamic=False, mode="reduce-overhead" if self._graphs else None)
        self._config = config
        self._micro_batch = plan.micro_batch
        self._rank = group.rank
        self._device = device

    def forward_backward(self, batch: RankBatch, meter: Meter, measure: bool) -> torch.Tensor:
        """Gradients of the mean loss over the global batch, one pass for each micro-batch of this rank."""
        passes = len(batch.micro_batches)
        losses = []
        for index, (inputs, targets) in enumerate(batch.micro_batches):
            seed_pass(self._device, self._config.seed, batch.step, self._rank * passes + index)
            self.statistics.before_pass(index)
            with self._silence() if index < passes - 1 else nullcontext():  # ranks meet in the last pass
                self._at(StepPart.FORWARD, batch.step + 1)
                with self.autocast():
                    outputs, loss = self._spread_pass(self._laid_out(inputs), targets)
                self.timer.ended(StepPart.FORWARD)
                self._at(StepPart.BACKWARD, batch.step + 1)
                if self._graphs:  # the next pass writes over what this one gave
                    outputs, loss = outputs.clone() if measure else outputs, loss.clone()
                self.scaler.scale(loss / passes if passes > 1 else loss).backward()
                self.timer.ended(StepPart.COMMUNICATION if self._meets else StepPart.BACKWARD)
                self._meets = False
            losses.append(loss.detach())
            meter.add_loss(loss, self._micro_batch)
            if measure:
                meter.add_metrics(outputs, targets, self._micro_batch)
        self.statistics.after_step()
        return torch.stack(losses).mean() if passes > 1 else losses[0]

    def clip_gradients(self) -> None:
        """Shorten the gradient to the recipe's norm, if it sets one."""
        if self._config.optim.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optim.clip_norm)

    def update_weights(self, lr: float) -> None:
        """One step of the optimizer at the given rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.timer.ended(StepPart.OPTIMIZER)

    def predict(self, inputs: Any, targets: Any, is_full: bool) -> tuple[Any, torch.Tensor]:
        """Outputs and loss of an evaluation batch; a ragged one is not worth compiling for."""
        forward = self._pass if is_full else self._pass.forward
        with self.autocast():
            return forward(self._laid_out(inputs), targets)

    def silent(self) -> AbstractContextManager[None]:
        """Steps whose gradients stay on this rank."""
        return self._silence()

    def _all_gradients_there(self) -> None:
        self.timer.ended(StepPart.BACKWARD)
        self._meets = True

    def _laid_out(self, inputs: Any) -> Any:
        """Inputs in the memory layout of the recipe."""
        return channels_last(inputs) if self._channels_last else inputs

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the recipe, for forward passes."""
        dtype = _DTYPES.get(self._config.precision)
        return torch.autocast(self._device.type, dtype) if dtype else nullcontext()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Try a step without keeping anything of it."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        try:
            yield
        finally:
            self.optimizer.zero_grad()
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
