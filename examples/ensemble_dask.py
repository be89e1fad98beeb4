"""A search by Optuna whose trials are done by the workers of a Dask cluster, and an ensemble of the best of each kind.

    python ensemble_dask.py                                   # a cluster of two processes of this machine
    python ensemble_dask.py --data mnist_10k --trials 48
    python ensemble_dask.py --scheduler tcp://127.0.0.1:8786  # one that is running; see docs/other-tools.md for TLS

A trial is a model of scikit-learn or XGBoost; its score, the accuracy on a third of the training images. The best of
each kind vote on images that the search has not seen. Workers need scikit-learn (and xgboost) in the version of this
machine, and nothing of this project: this file travels by value. The study is in ensemble.db: the same command goes on
with it, and `optuna-dashboard sqlite:///ensemble.db` shows it. Trials are asked for and told in rounds, so what is
tried does not depend on which worker is fast.
"""

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import distributed
import mnist_data
import numpy as np
import optuna

KINDS = ["forest", "neighbours", "logistic", *(["boosted"] if importlib.util.find_spec("xgboost") else [])]


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The settings of a trial."""
    match kind := trial.suggest_categorical("kind", KINDS):
        case "forest":
            found = {"max_depth": trial.suggest_int("max_depth", 4, 20)}
        case "neighbours":
            found = {"n_neighbors": trial.suggest_int("n_neighbors", 1, 9), "weights": "distance"}
        case "logistic":
            found = {"C": trial.suggest_float("C", 0.01, 10.0, log=True), "max_iter": 300}
        case _:
            depth, rate = trial.suggest_int("depth", 2, 6), trial.suggest_float("learning_rate", 0.03, 0.5, log=True)
            found = {"max_depth": depth, "learning_rate": rate, "n_estimators": 40, "n_jobs": 1}
    return {"kind": kind, **found}


def fitted(kind: str, x: Any, y: Any, **settings: Any) -> Any:
    """A model, trained. Libraries are imported where they are used: on a worker."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    models = {"forest": RandomForestClassifier, "neighbours": KNeighborsClassifier, "logistic": LogisticRegression}
    if kind == "boosted":
        from xgboost import XGBClassifier

        models[kind] = XGBClassifier
    seed = {} if kind == "neighbours" else {"random_state": 0}
    return models[kind](**settings, **seed).fit(x, y)


def score(settings: dict[str, Any], x: Any, y: Any) -> float:
    """The accuracy on the last third of the training images."""
    part = len(x) * 2 // 3
    return float((fitted(x=x[:part], y=y[:part], **settings).predict(x[part:]) == y[part:]).mean())


def probabilities(settings: dict[str, Any], x: Any, y: Any, held_out: Any) -> Any:
    """Of the ten digits for each held-out image, shape (images, 10)."""
    return fitted(x=x, y=y, **settings).predict_proba(held_out)


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
    local = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**local) as cluster, distributed.Client(cluster) as client:
        yield client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist_10k"], default="digits")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--together", type=int, default=4, help="trials in a round")
    parser.add_argument("--scheduler", help="of a cluster that is running")
    for name, meaning in (("ca-file", "the cluster's authority"), ("cert", "a certificate"), ("key", "its key")):
        parser.add_argument(f"--tls-{name}", help=f"{meaning}, as PEM, for tls://")
    arguments = parser.parse_args()
    data = {"digits": (mnist_data.load_sklearn, 1500), "mnist_10k": (lambda: mnist_data.load("t10k"), 8000)}
    read, num_train = data[arguments.data]
    train, val = read().split(num_train)
    x, held_out = (each.images.reshape(len(each), -1).astype(np.float32) / 255 for each in (train, val))
    study = optuna.create_study(
        study_name=arguments.data, storage="sqlite:///ensemble.db", direction="maximize", load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0),
    )  # fmt: skip
    with connected(arguments) as client:
        x_there, y_there = client.scatter([x, train.digits], broadcast=True)  # once to each worker, not for each trial
        while (missing := arguments.trials - len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE]))) > 0:
            trials = [study.ask() for _ in range(min(missing, arguments.together))]
            settings = [suggest(trial) for trial in trials]
            scores = client.gather([client.submit(score, each, x_there, y_there) for each in settings])
            for trial, each, found in zip(trials, settings, scores, strict=True):
                trial.set_user_attr("settings", each)
                study.tell(trial, found)
                print(f"{trial.number:3}  {found:.4f}  {each}")
        done = sorted(study.get_trials(states=[optuna.trial.TrialState.COMPLETE]), key=lambda trial: trial.value)
        best = {
            trial.params["kind"]: trial.user_attrs["settings"] for trial in done
        }  # of each kind, the last is the best
        said = client.gather([client.submit(probabilities, each, x_there, y_there, held_out) for each in best.values()])
        del x_there, y_there  # the workers may forget them, before they end
    for kind, found in zip(best, said, strict=True):
        print(f"the best {kind:<20} accuracy {(found.argmax(1) == val.digits).mean():.4f}")
    print(f"mean probability of these {len(best)}    accuracy {(np.mean(said, 0).argmax(1) == val.digits).mean():.4f}")


if __name__ == "__main__":
    main()
