"""The same regression with TensorFlow's MultiWorkerMirroredStrategy (pip install tensorflow, or tensorflow-cpu).

The loop is written out, because `fit` of Keras 3 does not know this strategy.

workers='"worker": ["127.0.0.1:29501", "127.0.0.1:29502"]'
for i in 0 1; do
  TF_CONFIG="{\"cluster\": {$workers}, \"task\": {\"type\": \"worker\", \"index\": $i}}" python with_tensorflow.py &
done; wait
"""

import json
import os

import numpy as np
import tensorflow as tf

EPOCHS, BATCH = 4, 64


def main() -> None:
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:  # each process has one: TensorFlow would take all of them
        tf.config.set_visible_devices(gpus[rank % len(gpus)], "GPU")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG
    num_processes = strategy.num_replicas_in_sync

    random = np.random.default_rng(0)
    x = random.standard_normal((4096, 20)).astype(np.float32)
    y = np.sin(x[:, :1]) + 0.1 * random.standard_normal((4096, 1)).astype(np.float32)
    mine = tf.data.Dataset.from_tensor_slices((x[rank::num_processes], y[rank::num_processes]))
    batches = mine.shuffle(4096, seed=0).batch(BATCH, drop_remainder=True)

    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential(
            [tf.keras.Input((20,)), tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(1)]
        )
        optimizer = tf.keras.optimizers.AdamW(0.01)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        def one(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs) - targets) ** 2) / num_processes
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(one, (inputs, targets)), axis=None)

    for epoch in range(1, EPOCHS + 1):
        losses = [float(step(inputs, targets)) for inputs, targets in batches]
        print(f"epoch {epoch}/{EPOCHS}  {len(losses)} steps, loss of all {np.mean(losses):.4f}")
    print(f"{num_processes} processes, weights sum to {sum(float(tf.reduce_sum(w)) for w in model.weights):.6f}")


if __name__ == "__main__":
    main()
