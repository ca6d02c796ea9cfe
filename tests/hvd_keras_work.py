"""What two ranks do in the tests of Keras: checks that run after each other, on one backend or with Keras 2."""

import inspect
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hvd_jobs import in_a_job, refused

SHARED = ["tensorflow", "torch", "jax"]
CHECKS: dict[str, list[str]] = {}  # the backends of each check, by its name


def check(*backends: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def note(function: Callable[..., None]) -> Callable[..., None]:
        CHECKS[function.__name__] = list(backends or SHARED)
        return function

    return note


def outcomes(backend: str) -> dict[str, str]:
    """What went wrong in each check of a backend, on this rank; nothing where all was right."""
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    os.environ |= {"KERAS_BACKEND": "tensorflow" if backend == "tf_keras" else backend}
    os.environ |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    warnings.simplefilter("ignore")  # of the frameworks themselves
    found: dict[str, str] = {}
    _run_checks(backend, found)
    return found


@in_a_job
def _run_checks(backend: str, found: dict[str, str]) -> None:
    if backend in ("tensorflow", "tf_keras"):
        import tensorflow as tf

        import tutti.horovod.keras.of_tensorflow  # noqa: F401

        tf.config.threading.set_intra_op_parallelism_threads(1)  # refused once TensorFlow's context has begun
        tf.config.threading.set_inter_op_parallelism_threads(1)
    for name, backends in CHECKS.items():
        if backend in backends:
            found[name] = ""
            try:
                globals()[name]()
            except Exception:
                found[name] = traceback.format_exc()
            failed = [bool(each) for each in gathered(found[name])]
            if any(failed) and not all(failed):
                break  # ranks may wait for each other from here on


def gathered(thing: Any) -> list[Any]:
    from tutti.horovod.torch.functions import allgather_object

    return allgather_object(thing)


def same_everywhere(thing: Any) -> bool:
    found = gathered(thing)
    return all(each == found[0] for each in found)


def data(rank: int, rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.RandomState(rank)
    return numbers.randn(rows, 6).astype("float32"), numbers.randn(rows, 2).astype("float32")


def small_model(seed: int, *middle: Any) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(5, activation="relu"), *middle, keras.layers.Dense(2)]
    return keras.Sequential(layers)


def line_model() -> Any:
    """One weight, whose gradient is the mean of the inputs whatever it is."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    return model, lambda y_true, y_pred: keras.ops.mean(y_pred)


def flat(model: Any) -> np.ndarray:
    return np.concatenate([weight.numpy().reshape(-1) for weight in model.weights])


def stepped(*gradients: float, **options: Any) -> list[float]:
    """Where a variable is after each gradient, with a rate of -1: what has been applied, added up."""
    import keras

    from tutti.horovod.keras.of_tensorflow import DistributedOptimizer

    variable = keras.Variable([0.0])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    optimizer.build([variable])
    found = []
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(np.array([-gradient], "float32"))], [variable])
        found.append(float(variable.numpy()[0]))
    assert int(optimizer.iterations.numpy()) == len(gradients)
    return found


@check()
def ranks_with_other_seeds_end_with_the_same_bits() -> None:
    import keras

    import tutti.horovod.keras as hvd

    model = small_model(hvd.rank(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    x, y = data(hvd.rank())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(1), hvd.callbacks.MetricAverageCallback()]
    told = model.fit(
        x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks, shuffle=False, validation_data=(x, y)
    )
    trained = [weight.numpy().tobytes() for weight in model.trainable_weights]
    assert same_everywhere(trained)
    assert same_everywhere([variable.numpy().tobytes() for variable in model.optimizer.variables])
    assert same_everywhere(told.history), "metrics are those of all ranks"
    assert not same_everywhere([float(np.sum(model.predict(x, verbose=0)))]), "data is each rank's own"


@check()
def two_ranks_train_like_one_with_their_batches_together() -> None:
    import keras

    import tutti.horovod.keras as hvd

    (x0, y0), (x1, y1) = data(0), data(1)
    together = [np.concatenate([a.reshape(4, 8, -1), b.reshape(4, 8, -1)], 1) for a, b in ((x0, x1), (y0, y1))]
    whole = [part.reshape(64, -1) for part in together]
    for steps in (None, 2):
        one, two = small_model(7), small_model(7)
        settings = {"learning_rate": 0.05, "momentum": 0.9, "gradient_accumulation_steps": steps}
        one.compile(keras.optimizers.SGD(**settings), "mse")
        two.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(**settings)), "mse")
        one.fit(*whole, batch_size=16, epochs=2, verbose=0, shuffle=False)
        two.fit(*data(hvd.rank()), batch_size=8, epochs=2, verbose=0, shuffle=False)
        np.testing.assert_allclose(flat(two), flat(one), rtol=1e-4, atol=1e-6)
        assert same_everywhere(flat(two).tobytes())


@check()
def rates_are_those_of_the_formulas() -> None:
    import keras

    import tutti.horovod.keras as hvd

    rates: list[float] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    model, loss = line_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.7)), loss)
    schedule = hvd.callbacks.LearningRateScheduleCallback
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
        schedule(0.8, 0.1, start_epoch=2, end_epoch=4),
        schedule(0.8, lambda epoch: epoch / 2, start_epoch=4, staircase=False, steps_per_epoch=4),
        Note(),
    ]
    x = np.ones((8, 1), "float32")
    told = model.fit(x, x, batch_size=2, epochs=5, verbose=0, callbacks=callbacks)
    size, steps = 2, 4
    warm = [0.8 * (1.0 / size * ((e + b / steps + 1.0 / steps) * (size - 1) / 2 + 1)) for e in (0, 1) for b in range(4)]
    stairs = [0.8 * 0.1**0] * 4 + [0.8 * 0.1**1] * 4
    slope = [0.8 * ((4 + b / steps) / 2) for b in range(4)]
    expected = [float(np.float32(rate)) for rate in warm + stairs + slope]
    assert rates == expected, (rates, expected)
    assert warm[-1] == 0.8
    assert told.history["lr"] == expected[3::4]


@check()
def momentum_is_corrected_when_the_rate_changes() -> None:
    import keras

    import tutti.horovod.keras as hvd

    model, loss = line_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5)), loss)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 1 + epoch, staircase=False)
    x = np.full((4, 1), 1.0 + hvd.rank(), "float32")
    model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
    weight, velocity, old, gradient = 0.0, 0.0, 0.4, 1.5
    for batch in range(8):
        rate = 0.4 * (1 + batch / 4)
        velocity = velocity * 0.5 * (rate / old) - rate * gradient
        weight, old = weight + velocity, rate
    np.testing.assert_allclose(flat(model), [weight], rtol=1e-5)


@check()
def gradients_are_added_up_over_passes() -> None:
    import keras

    import tutti.horovod.keras.of_tensorflow as hvd

    own = 1.0 + hvd.rank()  # 1.5 in the mean
    assert stepped(own, own, own, own, own, backward_passes_per_step=2) == [0, 3, 3, 6, 6]
    averaged = stepped(own, own, own, backward_passes_per_step=3, average_aggregated_gradients=True)
    np.testing.assert_allclose(averaged, [0, 0, 1.5])
    for scaled in (False, True):  # in a compiled step, too
        model, loss = line_model()
        inner: Any = keras.optimizers.SGD(1.0)
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0) if scaled else inner
        optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=2)
        model.compile(optimizer, loss)
        x = np.full((3, 1), -own, "float32")
        model.fit(x, x, batch_size=1, epochs=1, verbose=0)
        np.testing.assert_allclose(flat(model), [3.0])
        assert int(optimizer.iterations.numpy()) == 3
        counter = optimizer._agg_helper.counter
        assert int(counter.numpy() if hasattr(counter, "numpy") else counter) == 1


@check()
def options_of_the_reduction_are_kept() -> None:
    import keras

    import tutti.horovod.keras.of_tensorflow as hvd
    from tutti.horovod.keras import PartialDistributedOptimizer

    own = 1.0 + 2 * hvd.rank()  # 2 in the mean
    assert stepped(own) == [2]
    assert stepped(own, op=hvd.Sum) == [4]
    assert stepped(own, gradient_predivide_factor=2.0) == [2]
    assert stepped(own, groups=3) == [2]
    third = float(np.float16(1 / 3))
    assert stepped(1 / 3, compression=hvd.Compression.fp16) == [third]
    first = hvd.add_process_set([0])
    assert stepped(own, process_set=first) == [own], "alone in a set, or outside"
    hvd.remove_process_set(first)
    variable = keras.Variable(np.zeros(2), dtype="bfloat16")
    gradient = keras.ops.cast(keras.ops.full((2,), -own), "bfloat16")
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([gradient], [variable])
    assert keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32")).tolist() == [2, 2]
    inputs = keras.Input((6,))
    local, shared = keras.layers.Dense(2, use_bias=False), keras.layers.Dense(2, use_bias=False)
    model = keras.Model(inputs, shared(local(inputs)))
    for scales, factor in ((True, 0.5), (False, 1.0)):
        optimizer = PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=local, scale_local_gradients=scales
        )
        before = [weight.numpy() for weight in model.trainable_weights]
        gradients = [keras.ops.full(weight.shape, own) for weight in model.trainable_weights]
        optimizer.apply(gradients, model.trainable_weights)
        moved = [a - w.numpy() for a, w in zip(before, model.trainable_weights, strict=True)]
        np.testing.assert_allclose(moved[0], own * factor, rtol=1e-5)
        np.testing.assert_allclose(moved[1], 2.0, rtol=1e-5)


@check()
def an_overflow_on_one_rank_is_everybodys() -> None:
    import keras

    import tutti.horovod.keras as hvd

    scaling = keras.optimizers.LossScaleOptimizer
    ways = [
        hvd.DistributedOptimizer(scaling(keras.optimizers.SGD(1.0), initial_scale=8.0)),
        scaling(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), initial_scale=8.0),
    ]
    for optimizer in ways:
        model, loss = line_model()
        model.compile(optimizer, loss)
        for step, (value, weight, scale) in enumerate([(-1.0, 1, 8), (-np.inf, 1, 4), (-3.0, 4, 4)]):
            own = value if hvd.rank() == 1 or step != 1 else -1.0
            x = np.full((1, 1), own, "float32")
            model.train_on_batch(x, x)
            assert flat(model).tolist() == [weight], step
            assert float(optimizer.dynamic_scale.numpy()) == scale, step


@check()
def metrics_that_a_rank_lacks_are_named() -> None:
    import tutti.horovod.keras as hvd

    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": 0.5}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "accuracy": 0.5}
    logs = {"loss": 1.0} | ({"val_loss": 2.0} if hvd.rank() == 0 else {"own": 1.0})
    kind, text = refused(lambda: callback.on_epoch_end(1, logs))
    assert kind == "ConfigError"
    assert "rank 0 lacks own; rank 1 lacks val_loss" in text, text


@check()
def saved_models_load_with_us_and_without() -> None:
    import keras

    import tutti.horovod.keras as hvd
    from tutti.horovod.keras.patches import is_distributed

    model = small_model(3)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), name="mine"), keras.losses.MeanSquaredError())
    model.fit(*data(hvd.rank()), batch_size=16, epochs=1, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("model.keras", "model.h5"):
            path = Path(folder) / name
            model.save(path)
            if name == "model.keras":
                config = json.loads(zipfile.ZipFile(path).read("config.json"))
                assert "tutti" not in json.dumps(config)
            plain, ours = keras.models.load_model(path), hvd.load_model(path)
            assert not is_distributed(plain.optimizer)
            assert is_distributed(ours.optimizer) and isinstance(ours.optimizer, keras.optimizers.Adam)
            for loaded in (plain, ours) if name == "model.keras" else (ours,):  # Keras 3 reads no state there
                for own, saved in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
                    np.testing.assert_array_equal(own.numpy(), saved.numpy())
        ours.fit(*data(hvd.rank()), batch_size=16, epochs=1, verbose=0, shuffle=False)
        assert same_everywhere(flat(ours).tobytes())
        bare = small_model(3)
        bare.save(Path(folder) / "bare.keras")
        assert "without an optimizer" in refused(lambda: hvd.load_model(Path(folder) / "bare.keras"))[1]


@check()
def an_optimizer_keeps_what_it_was() -> None:
    import keras

    import tutti.horovod.keras as hvd

    model = small_model(3)
    plain = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 100), weight_decay=0.1)
    plain.exclude_from_weight_decay(var_names=["bias"])
    model.compile(plain, "mse")
    model.fit(*data(0), batch_size=16, epochs=1, verbose=0)
    made = hvd.DistributedOptimizer(plain)
    kind = type(plain)
    names = (kind.__name__, kind.__qualname__, kind.__module__)
    assert (type(made).__name__, type(made).__qualname__, type(made).__module__) == names
    assert isinstance(made, kind) and made.get_config() == plain.get_config()
    assert made.variables() == made.variables
    for own, other in zip(made.variables, plain.variables, strict=True):
        assert own is not other
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    assert [made._use_weight_decay(v) for v in model.trainable_weights] == [True, False, True, False]
    remade = made.from_config(made.get_config())
    assert remade.get_config() == made.get_config()


@check()
def wrong_options_are_refused_with_what_to_write() -> None:
    import keras

    import tutti.horovod.keras as hvd
    from tutti.horovod.keras.of_tensorflow import DistributedOptimizer

    sgd = keras.optimizers.SGD
    cases = [
        (lambda: DistributedOptimizer(sgd(), op=hvd.Adasum), "expected hvd.Average or hvd.Sum"),
        (lambda: DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0), "use op=hvd.Average"),
        (lambda: DistributedOptimizer(sgd(), backward_passes_per_step=0), "must be > 0"),
        (lambda: DistributedOptimizer(sgd(), groups="all"), "expected a number of groups"),
        (lambda: DistributedOptimizer(DistributedOptimizer(sgd())), "distributed already"),
        (lambda: DistributedOptimizer("adam"), "keras.optimizers.Adam(0.001)"),
        (
            lambda: DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=2),
            "Leave one of them out",
        ),
        (lambda: hvd.callbacks.LearningRateWarmupCallback(None), "`initial_lr` is required"),
        (lambda: hvd.allreduce(1.0, op=hvd.Sum), "supersedes average"),
        (lambda: hvd.callbacks.LearningRateWarmupCallback(0.1).on_train_begin(), "steps_per_epoch parameter"),
    ]
    for call, text in cases:
        kind, said = refused(call)
        assert kind == "ValueError" and text in said, (kind, said)
    assert refused(lambda: hvd.broadcast_global_variables(0))[0] == "RuntimeError"
    checkpoint = hvd.callbacks.BestModelCheckpoint()
    assert "checkpoint.filepath" in refused(checkpoint.on_train_begin)[1]


@check()
def values_travel() -> None:
    import tutti.horovod.keras as hvd
    import tutti.horovod.keras.of_tensorflow as hvd_of_tensorflow

    own = float(hvd.rank())
    assert float(hvd.allreduce(own)) == 0.5
    assert float(hvd.allreduce(own, average=False)) == 1.0
    assert float(hvd_of_tensorflow.allreduce(own, op=hvd.Sum)) == 1.0
    assert np.asarray(hvd.allgather([own])).tolist() == [0.0, 1.0]
    assert np.asarray(hvd.broadcast([own, own], 1)).tolist() == [1.0, 1.0]
    assert np.asarray(hvd.reducescatter([own, own + 2], op=hvd.Sum)).tolist() == [1.0 + 4 * own]


@check()
def a_state_is_saved_restored_and_made_the_same() -> None:
    import keras

    import tutti.horovod.keras as hvd

    model = small_model(hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model, batch=20 + hvd.rank(), epoch=hvd.rank())
    state.sync()
    assert (state.batch, state.epoch) == (20, 0) and same_everywhere(flat(model).tobytes())
    kept, state.batch = flat(model), 0
    commits: list[int] = []
    state.register_reset_callbacks([lambda: commits.append(state.batch)])
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
    ]
    model.fit(*data(hvd.rank()), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert (state.batch, state.epoch, state._num_commits) == (0, 2, 4)
    trained = flat(model)
    assert not np.array_equal(trained, kept)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    state.restore()
    np.testing.assert_array_equal(flat(model), trained)

    @hvd.elastic.run
    def train(own: Any) -> int:
        return own.epoch

    assert train(state) == 2


@check()
def training_goes_on_after_a_failure() -> None:
    import keras

    import tutti.horovod.keras as hvd
    from tutti.horovod import basics
    from tutti.horovod.errors import HorovodInternalError

    def fail(*operations: Any) -> Any:
        raise HorovodInternalError("Horovod has lost a rank")

    class Break(keras.callbacks.Callback):
        breaks = 1

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and self.breaks:
                self.breaks = 0
                basics.engine().submit = fail

    model = small_model(hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    begun, breaker = [], Break()

    @hvd.elastic.run
    def train(own: Any) -> None:
        begun.append((own.epoch, int(own.optimizer.iterations.numpy())))
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(own),
            hvd.elastic.CommitStateCallback(own, batches_per_commit=2),
            breaker,
        ]
        own.model.fit(*data(hvd.rank()), batch_size=8, epochs=2 - own.epoch, verbose=0, callbacks=callbacks)

    train(state)
    assert begun == [(0, 0), (0, 2)], begun
    assert state.epoch == 2 and same_everywhere(flat(model).tobytes())
    assert int(model.optimizer.iterations.numpy()) == 2 + 8


@check()
def signatures_are_those_of_horovod() -> None:
    import tutti.horovod.keras as hvd
    import tutti.horovod.keras.of_tensorflow as tf_hvd

    start = "optimizer, name=None, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, "
    start += "gradient_predivide_factor=1.0, op=0, "
    passes = "backward_passes_per_step=1, average_aggregated_gradients=False, "
    expected = {
        hvd.DistributedOptimizer: start + "num_groups=0, groups=None",
        tf_hvd.DistributedOptimizer: start
        + passes
        + "num_groups=0, groups=None, process_set=all, scale_local_gradients=True",
        hvd.PartialDistributedOptimizer: start
        + passes
        + "groups=None, process_set=all, local_layers=None, scale_local_gradients=True",
        hvd.allreduce: "value, name=None, average=True, prescale_factor=1.0, postscale_factor=1.0, op=None, "
        "compression=none",
        tf_hvd.allreduce: "value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, "
        "compression=none",
        hvd.allgather: "value, name=None",
        hvd.broadcast: "value, root_rank, name=None",
        hvd.reducescatter: "value, name=None, op=0",
        hvd.broadcast_global_variables: "root_rank",
        hvd.load_model: "filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False",
        tf_hvd.load_model: "filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False",
        hvd.callbacks.BroadcastGlobalVariablesCallback: "root_rank, device='', local_variables=None",
        hvd.callbacks.MetricAverageCallback: "device=''",
        hvd.callbacks.LearningRateWarmupCallback: "initial_lr, warmup_epochs=5, momentum_correction=True, "
        "steps_per_epoch=None, verbose=0",
        hvd.callbacks.LearningRateScheduleCallback: "initial_lr, multiplier, start_epoch=0, end_epoch=None, "
        "staircase=True, momentum_correction=True, steps_per_epoch=None",
        hvd.callbacks.BestModelCheckpoint: "monitor='val_loss', verbose=0, mode='auto', save_freq='epoch'",
        tf_hvd.callbacks.BestModelCheckpoint: "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', "
        "save_freq='epoch'",
        hvd.elastic.KerasState: "model, optimizer=None, **kwargs",
        hvd.elastic.CommitStateCallback: "state, batches_per_commit=1",
        hvd.elastic.UpdateBatchStateCallback: "state",
        hvd.elastic.UpdateEpochStateCallback: "state",
    }

    def shown(parameter: inspect.Parameter) -> str:
        if parameter.kind is parameter.VAR_KEYWORD:
            return f"**{parameter.name}"
        default = parameter.default
        known = {hvd.global_process_set: "all", hvd.Compression.none: "none"}
        if default is parameter.empty:
            return parameter.name
        return f"{parameter.name}={known.get(default, repr(default))}"

    for function, text in expected.items():
        found = ", ".join(shown(each) for each in inspect.signature(function).parameters.values())
        assert found == text, (function, found)
    assert tf_hvd.callbacks.MetricAverageCallback is hvd.callbacks.MetricAverageCallback
    assert not hasattr(tf_hvd, "Adasum") and not hasattr(tf_hvd, "PartialDistributedOptimizer")
    assert not hasattr(hvd, "add_process_set") and tf_hvd.ProcessSet


@check("tensorflow", "torch")
def a_step_is_not_compiled() -> None:
    import keras

    import tutti.horovod.keras as hvd

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tutti.horovod").addHandler(handler)
    for way in (lambda o: o, keras.optimizers.LossScaleOptimizer):
        model = small_model(1)
        model.compile(way(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), "mse", jit_compile=True)
        model.train_on_batch(*data(hvd.rank()))
        assert model.jit_compile is False and same_everywhere(flat(model).tobytes())
    logging.getLogger("tutti.horovod").removeHandler(handler)
    assert len(said) == 2 and "jit_compile=False" in said[0], said
    model = small_model(1)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    model.make_train_function()
    assert model.jit_compile is True, "others may be compiled"


@check("tensorflow")
def rows_of_gradients_travel() -> None:
    import keras
    import tensorflow as tf

    import tutti.horovod.keras.of_tensorflow as hvd

    for options in ({}, {"sparse_as_dense": True}, {"sparse_as_dense": True, "backward_passes_per_step": 2}):
        table = keras.Variable(np.zeros((4, 2), "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        rows = tf.IndexedSlices(-tf.ones((2, 2)), tf.constant([0, 1 + hvd.rank()]), tf.constant([4, 2]))
        for _ in range(options.get("backward_passes_per_step", 1)):
            optimizer.apply([rows], [table])
        passes = options.get("backward_passes_per_step", 1)
        assert (table.numpy()[:, 0] / passes).tolist() == [1.0, 0.5, 0.5, 0.0], options
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    kind, said = refused(lambda: optimizer.apply([rows], [keras.Variable(np.zeros((4, 2), "float32"))]))
    assert kind == "ValueError" and "sparse_as_dense=True" in said


@check("tensorflow")
def a_loop_of_ones_own_trains() -> None:
    import keras
    import tensorflow as tf

    import tutti.horovod.keras.of_tensorflow as hvd

    for options in ({}, {"backward_passes_per_step": 2}):
        model = small_model(5)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

        @tf.function
        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        losses = [float(step(*data(hvd.rank()))) for _ in range(3)]
        assert losses[2] < losses[0] and same_everywhere(flat(model).tobytes())


@check("tensorflow")
def what_scripts_for_keras_2_say_is_taken() -> None:
    import keras
    from keras import backend

    import tutti.horovod.keras as hvd
    from tutti.horovod.alias import SITE_FOLDER

    assert refused(lambda: keras.optimizers.SGD(lr=0.1))[0] == "ValueError"
    sys.path.insert(0, str(SITE_FOLDER))
    from horovod import _keras  # pyright: ignore[reportAttributeAccessIssue]
    from horovod import keras as named
    from horovod.keras.callbacks import MetricAverageCallback
    from horovod.tensorflow import keras as of_tensorflow

    assert named.DistributedOptimizer is hvd.DistributedOptimizer
    assert named.callbacks.MetricAverageCallback is of_tensorflow.callbacks.MetricAverageCallback
    assert MetricAverageCallback is hvd.callbacks.MetricAverageCallback
    assert of_tensorflow.elastic.KerasState is named.elastic.KerasState is hvd.elastic.KerasState
    assert _keras.distribute and of_tensorflow.add_process_set and "load_model" in dir(named)
    assert type(keras.optimizers.legacy.SGD(lr=0.5)) is keras.optimizers.SGD
    norm: Any = keras.layers.BatchNormalization(fused=False)
    norm.build([1, 2])
    assert len({variable.ref() for variable in (*norm.weights, *norm.weights)}) == 4
    optimizer: Any = hvd.DistributedOptimizer(keras.optimizers.SGD(lr=0.25, momentum=0.9))
    assert float(optimizer.lr.numpy()) == 0.25
    optimizer.lr = 0.5
    backend.set_value(optimizer.lr, 2 * backend.get_value(optimizer.lr))
    assert float(optimizer.learning_rate.numpy()) == 1.0
    backend.set_value(optimizer.lr, 0.01)
    assert len(keras.optimizers.SGD(learning_rate=0.1).variables()) == 2
    model: Any = small_model(0)
    model.compile(loss="mse", optimizer=optimizer, experimental_run_tf_function=False)
    x, y = data(hvd.rank())
    model.fit_generator(((x, y) for _ in range(2)), 2, 1, 0, workers=4, use_multiprocessing=True)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weights.h5")
        model.save_weights(path)
        other = small_model(1)
        other.load_weights(path)
        np.testing.assert_array_equal(flat(other), flat(model))
        model.compile(loss=keras.losses.MeanSquaredError(), optimizer=optimizer)
        checkpoint = keras.callbacks.ModelCheckpoint(str(Path(folder) / "checkpoint-{epoch}.h5"))
        model.fit(x, y, verbose=0, callbacks=[checkpoint])
        again = hvd.load_model(Path(folder) / "checkpoint-1.h5")
        np.testing.assert_array_equal(flat(again), flat(model))


def old_model(seed: int) -> Any:
    import tf_keras

    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(5, activation="relu", input_shape=(6,)), tf_keras.layers.Dense(2)]
    )


def old_optimizers() -> list[Any]:
    """Of both kinds, and with a scaled loss."""
    import tf_keras

    kinds = tf_keras.optimizers
    scaled = [
        tf_keras.mixed_precision.LossScaleOptimizer(kind(0.05, momentum=0.9), initial_scale=8.0)
        for kind in (kinds.SGD, kinds.legacy.SGD)
    ]
    return [kinds.SGD(0.05, momentum=0.9), kinds.legacy.SGD(0.05, momentum=0.9), *scaled]


@check("tf_keras")
def keras_2_trains_like_one_rank() -> None:
    import tutti.horovod.keras.of_tensorflow as hvd

    (x0, y0), (x1, y1) = data(0), data(1)
    together = [np.concatenate([a.reshape(4, 8, -1), b.reshape(4, 8, -1)], 1) for a, b in ((x0, x1), (y0, y1))]
    whole = [part.reshape(64, -1) for part in together]
    one = old_model(7)
    one.compile(old_optimizers()[0], "mse")
    one.fit(*whole, batch_size=16, epochs=2, verbose=0, shuffle=False)
    for own in old_optimizers():
        two = old_model(7)
        two.compile(hvd.DistributedOptimizer(own), "mse", metrics=["mae"], experimental_run_tf_function=False)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        told = two.fit(
            *data(hvd.rank()), batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=callbacks, workers=1
        )
        np.testing.assert_allclose(flat(two), flat(one), rtol=1e-4, atol=1e-6)
        assert same_everywhere(flat(two).tobytes()) and same_everywhere(told.history)


@check("tf_keras")
def keras_2_starts_from_one_ranks_weights() -> None:
    import tutti.horovod.keras.of_tensorflow as hvd

    for optimizer in old_optimizers()[:2]:
        model = old_model(hvd.rank())
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        local = model.layers[0].weights
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=local)
        model.fit(*data(hvd.rank()), batch_size=8, verbose=0, callbacks=[callback])
        assert same_everywhere([weight.numpy().tobytes() for weight in model.layers[1].weights])
        assert not same_everywhere([weight.numpy().tobytes() for weight in local])


@check("tf_keras")
def keras_2_follows_the_rates() -> None:
    import tf_keras

    import tutti.horovod.keras.of_tensorflow as hvd

    for optimizer in old_optimizers()[:2]:
        optimizer = hvd.DistributedOptimizer(optimizer)
        model = tf_keras.Sequential(
            [tf_keras.layers.Dense(1, use_bias=False, input_shape=(1,), kernel_initializer="zeros")]
        )
        model.compile(optimizer, lambda y_true, y_pred: y_pred)
        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=1, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1),
        ]
        x = np.full((4, 1), 1.0 + hvd.rank(), "float32")
        told = model.fit(x, x, batch_size=1, epochs=3, verbose=0, callbacks=callbacks)
        assert told.history["lr"] == [float(np.float32(0.8)), float(np.float32(0.8)), float(np.float32(0.4))]
        weight, velocity, old = 0.0, 0.0, 0.05
        rates = [0.8 * (0.5 * ((batch + 1) / 4 + 1)) for batch in range(4)] + [0.8] * 4 + [0.4] * 4
        for rate in rates:
            velocity = velocity * 0.9 * rate / old - rate * 1.5
            weight, old = weight + velocity, rate
        np.testing.assert_allclose(flat(model), [weight], rtol=1e-5)


@check("tf_keras")
def keras_2_adds_up_gradients_over_passes() -> None:
    import tensorflow as tf
    import tf_keras

    import tutti.horovod.keras.of_tensorflow as hvd

    for kind, averages in ((tf_keras.optimizers.SGD, False), (tf_keras.optimizers.legacy.SGD, True)):
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": averages}
        optimizer = hvd.DistributedOptimizer(kind(1.0), sparse_as_dense=True, **options)
        shared, local = tf.Variable([0.0, 0.0]), tf.Variable([0.0])
        optimizer.register_local_var(local)

        @tf.function
        def step(optimizer: Any = optimizer, shared: Any = shared, local: Any = local) -> None:
            def loss() -> Any:
                return -(1.0 + hvd.rank()) * (tf.gather(shared, [0]) + local)

            pairs = optimizer._compute_gradients(loss, [shared, local])
            optimizer.apply_gradients(pairs)

        for count in range(1, 6):
            step()
            assert int(optimizer.iterations.numpy()) == count
            passes = (count // 2) * (1 if averages else 2)
            np.testing.assert_allclose(shared.numpy(), [1.5 * passes, 0])
            np.testing.assert_allclose(local.numpy(), [(1.0 + hvd.rank()) / 2 * passes])
        assert int(optimizer._agg_helper.counter.numpy()) == 1


@check("tf_keras")
def keras_2_loads_what_was_saved() -> None:
    import tf_keras

    import tutti.horovod.keras.of_tensorflow as hvd
    from tutti.horovod.gradients import variables_of
    from tutti.horovod.keras.backends import keras_of_tensorflow
    from tutti.horovod.keras.patches import is_distributed

    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    assert keras_of_tensorflow() is tf_keras
    with tempfile.TemporaryDirectory() as folder:
        for place, optimizer in enumerate(old_optimizers()[:2]):
            model = old_model(3)
            model.compile(hvd.DistributedOptimizer(optimizer), tf_keras.losses.MeanSquaredError())
            model.fit(*data(hvd.rank()), batch_size=16, verbose=0)
            path = str(Path(folder) / f"{place}.h5")
            model.save(path)
            plain, ours = tf_keras.models.load_model(path), hvd.load_model(path, legacy_opts=place == 1)
            assert not is_distributed(plain.optimizer) and is_distributed(ours.optimizer)
            saved = [variable.numpy() for variable in variables_of(model.optimizer)]
            for own, value in zip(variables_of(ours.optimizer), saved, strict=True):
                np.testing.assert_array_equal(own.numpy(), value)
            ours.fit(*data(hvd.rank()), batch_size=16, verbose=0, shuffle=False)
            assert same_everywhere(flat(ours).tobytes())
            config = model.optimizer.get_config()
            assert type(model.optimizer).from_config(config).get_config() == config


@check("tf_keras")
def keras_2_keeps_a_state() -> None:
    import tf_keras

    import tutti.horovod.keras.of_tensorflow as hvd

    model = old_model(hvd.rank())
    state = hvd.elastic.KerasState(model, tf_keras.optimizers.legacy.Adam(0.1), batch=20 + hvd.rank())
    state.sync()
    kept = flat(model)
    assert state.batch == 20 and same_everywhere(kept.tobytes())
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    state.restore()
    np.testing.assert_array_equal(flat(model), kept)
