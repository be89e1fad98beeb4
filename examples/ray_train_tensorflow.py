"""Ray Train with Keras: the CNN of mnist_cnn.py in TensorFlow, on two workers, by MultiWorkerMirroredStrategy.

    pip install "ray[default,train]" tensorflow tf_keras safetensors          # in an environment without cuadrilla
    python ray_train_tensorflow.py                                            # two processes of this machine
    ray job submit --working-dir . -- python ray_train_tensorflow.py --workers 4 --gpu --out /shared/ray

The images are MNIST's test images, which mnist_data.py downloads into the folder `mnist`. tf_keras is Keras 2: Keras 3
cannot train under this strategy.
"""

import argparse
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ray reads them when it is imported. A cluster of this machine alone has a token, and its ports on the loopback.
os.environ.setdefault("RAY_AUTH_MODE", "token")
if "RAY_ADDRESS" not in os.environ:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import numpy as np
import ray
from numpy.typing import NDArray
from ray import train
from ray.train.tensorflow import TensorflowTrainer
from safetensors.numpy import load_file, save_file

MNIST = Path(__file__).parent / "mnist"
NUM_TRAIN = 8000
MODEL = "model.safetensors"

Images = NDArray[np.float32]
Digits = NDArray[np.int64]


def train_loop(settings: dict[str, Any]) -> None:
    """What each worker runs. TensorFlow is imported here: the process that starts the training does not need it."""
    import tensorflow as tf
    import tf_keras as keras

    keras.utils.set_random_seed(settings["seed"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(settings["lr"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, metrics=["accuracy"])
    begin = resume(model)
    images, digits = load()
    batch = settings["batch"] * strategy.num_replicas_in_sync  # of all workers together: Keras shares it out
    learn = tf.data.Dataset.from_tensor_slices((images[:NUM_TRAIN], digits[:NUM_TRAIN]))
    learn = learn.shuffle(NUM_TRAIN, seed=settings["seed"]).batch(batch, drop_remainder=True)
    held_out = tf.data.Dataset.from_tensor_slices((images[NUM_TRAIN:], digits[NUM_TRAIN:])).batch(batch)
    for epoch in range(begin, settings["epochs"]):
        model.fit(learn, verbose=0)
        values = model.evaluate(held_out, verbose=0, return_dict=True)
        metrics = {"epoch": epoch + 1, **{name: float(value) for name, value in values.items()}}
        if train.get_context().get_world_rank() != 0:
            train.report(metrics)  # every worker reports, or the others wait for it
            continue
        with saved(model, epoch=epoch + 1) as checkpoint:
            train.report(metrics, checkpoint=checkpoint)


def make_model() -> Any:
    from tf_keras import Sequential, layers

    def convolution(channels: int) -> Any:
        return layers.Conv2D(channels, 3, padding="same", activation="relu")

    first = [layers.InputLayer((28, 28, 1)), convolution(16), layers.MaxPooling2D()]
    second = [convolution(32), layers.MaxPooling2D(), layers.Flatten()]
    return Sequential([*first, *second, layers.Dense(128, activation="relu"), layers.Dense(10)])


def load() -> tuple[Images, Digits]:
    """MNIST's 10,000 test images, shape (N, 28, 28, 1), from 0 to 1; and their digits. See mnist_data.py."""
    with gzip.open(MNIST / "t10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(MNIST / "t10k-labels-idx1-ubyte.gz") as file:
        digits = np.frombuffer(file.read(), np.uint8, offset=8)
    return images.astype(np.float32) / 255, digits.astype(np.int64)


@contextmanager
def saved(model: Any, *, epoch: int) -> Iterator[train.Checkpoint]:
    """The weights, without a pickle. The optimizer starts anew after a resume: its state is small beside an epoch."""
    weights = {f"{number:03}": value for number, value in enumerate(model.get_weights())}
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder) / MODEL)
        checkpoint = train.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"epoch": epoch})
        yield checkpoint


def resume(model: Any) -> int:
    """Take up the last checkpoint of this run, if there is one; how many epochs it has seen."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        weights = load_file(Path(folder) / MODEL)
    model.set_weights([weights[name] for name in sorted(weights)])
    return int(checkpoint.get_metadata()["epoch"])


def connect() -> None:
    """The cluster whose job this is, or whose address is in RAY_ADDRESS; else one of this machine, for now."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init("local", dashboard_host="127.0.0.1", _node_ip_address="127.0.0.1")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Keras CNN on MNIST with Ray Train.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a card for each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images of a worker in a step")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("ray-results"), help="a folder that all machines share")
    settings = parser.parse_args()
    connect()
    trainer = TensorflowTrainer(
        train_loop,
        train_loop_config={name: getattr(settings, name) for name in ("epochs", "batch", "lr", "seed")},
        scaling_config=train.ScalingConfig(num_workers=settings.workers, use_gpu=settings.gpu),
        run_config=train.RunConfig(
            name="keras",
            storage_path=str(settings.out.resolve()),
            failure_config=train.FailureConfig(max_failures=3),  # all workers start again from the last checkpoint
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    ray.shutdown()
    assert result.checkpoint is not None
    print(json.dumps({**result.metrics, "checkpoint": result.checkpoint.path}))


if __name__ == "__main__":
    main()
