"""Many small models on a Dask cluster, and what they say together: an ensemble on handwritten digits.

    python ensemble_dask.py                                   # a cluster of two processes of this machine
    python ensemble_dask.py --data mnist_10k --models 24
    python ensemble_dask.py --scheduler tcp://127.0.0.1:8786  # a cluster that is running; see docs/dask.md for TLS

Each model is trained on a draw of the images with replacement and a random half of the pixels, so that they err on
different images: a model that is the same everywhere adds nothing to a vote. Every model and draw comes from its number
alone, so the accuracies do not depend on which machine trains what. Nothing of this project runs on the workers but
this file, which travels by value: they need scikit-learn (and xgboost where it is used) in the same version.
"""

import argparse
import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import distributed
import mnist_data
import numpy as np
from numpy.typing import NDArray

KINDS = ("logistic", "tree", "forest", "neighbours")
BOOSTED = "xgboost"


def make(kind: str, seed: int) -> Any:
    """Scikit-learn is imported where it is used: on a worker."""
    match kind:
        case "logistic":
            from sklearn.linear_model import LogisticRegression

            return LogisticRegression(max_iter=200, C=0.1)
        case "tree":
            from sklearn.tree import DecisionTreeClassifier

            return DecisionTreeClassifier(max_depth=12, random_state=seed)
        case "forest":
            from sklearn.ensemble import RandomForestClassifier

            return RandomForestClassifier(n_estimators=30, random_state=seed)
        case "neighbours":
            from sklearn.neighbors import KNeighborsClassifier

            return KNeighborsClassifier(n_neighbors=3)
        case _:
            from xgboost import XGBClassifier

            return XGBClassifier(n_estimators=30, max_depth=6, n_jobs=1, random_state=seed)


def train_one(
    number: int, kind: str, x: NDArray[np.float32], y: NDArray[np.int64], held_out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The probabilities that model `number` gives to the ten digits of each held-out image, shape (images, 10)."""
    chance = np.random.default_rng(number)
    pixels = chance.permutation(x.shape[1])[: x.shape[1] // 2]
    rows = chance.integers(0, len(x), len(x))
    model = make(kind, number)
    model.fit(x[rows][:, pixels], y[rows])
    found = np.zeros((len(held_out), 10), dtype=np.float32)
    found[:, model.classes_.astype(int)] = model.predict_proba(held_out[:, pixels])
    return found


def load(name: str) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Pixels from 0 to 1 and digits, to train on and held out."""
    match name:
        case "digits":
            train, val = mnist_data.load_sklearn().split(1500)
        case "mnist_10k":
            train, val = mnist_data.load("t10k").split(8000)
        case _:
            train, val = mnist_data.load("train"), mnist_data.load("t10k")
    x, held_out = (each.images.reshape(len(each), -1).astype(np.float32) / 255 for each in (train, val))
    return x, train.digits, held_out, val.digits


def show(kinds: list[str], found: list[NDArray[np.float32]], digits: NDArray[np.int64]) -> None:
    """Each kind's models by themselves, then together: by majority and by mean probability."""
    each = [float((probabilities.argmax(1) == digits).mean()) for probabilities in found]
    for kind, number in Counter(kinds).items():
        own = [accuracy for accuracy, of in zip(each, kinds, strict=True) if of == kind]
        print(f"{kind:<12} {number:3} models  accuracy {min(own):.4f} to {max(own):.4f}")
    votes = np.stack([np.eye(10, dtype=int)[probabilities.argmax(1)] for probabilities in found]).sum(0)
    print(f"one model, on average    accuracy {np.mean(each):.4f} (best {max(each):.4f})")
    print(f"majority of {len(found):3} models   accuracy {(votes.argmax(1) == digits).mean():.4f}")
    print(f"mean of {len(found):3} models       accuracy {(np.mean(found, axis=0).argmax(1) == digits).mean():.4f}")


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[distributed.Client]:
    """A cluster that was named, or processes of this machine, which listen on 127.0.0.1 only."""
    if arguments.scheduler:
        files = {"tls_ca_file": arguments.tls_ca_file, "tls_client_cert": arguments.tls_cert}
        files["tls_client_key"] = arguments.tls_key
        security = distributed.Security(**files) if any(files.values()) else None
        with distributed.Client(arguments.scheduler, security=security) as client:
            yield client
        return
    with (
        distributed.LocalCluster(
            n_workers=arguments.processes, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist_10k", "mnist"], default="digits")
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--scheduler", help="of a cluster that is running")
    parser.add_argument("--processes", type=int, default=2, help="of this machine, without --scheduler")
    for name, meaning in (("ca-file", "the cluster's authority"), ("cert", "a certificate"), ("key", "its key")):
        parser.add_argument(f"--tls-{name}", help=f"{meaning}, as PEM, for tls://")
    arguments = parser.parse_args()
    if min(arguments.models, arguments.processes) < 1:
        parser.error("--models and --processes begin at 1")
    kinds = list(KINDS)
    if importlib.util.find_spec(BOOSTED):
        kinds.append(BOOSTED)
    else:
        print("xgboost is not installed here: the ensemble has none of its models (pip install xgboost)")
    x, y, held_out, digits = load(arguments.data)
    chosen = [kinds[number % len(kinds)] for number in range(arguments.models)]
    with connected(arguments) as client:
        data = client.scatter([x, y, held_out], broadcast=True)  # once to each worker, not once for each model
        models = [client.submit(train_one, number, kind, *data) for number, kind in enumerate(chosen)]
        found = client.gather(models)
        del data, models  # the workers may forget them, before they end
    show(chosen, found, digits)


if __name__ == "__main__":
    main()
