"""A random forest on the handwritten digits of scikit-learn: how good and how large it is, for `cuadrilla tune`."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import StratifiedKFold, cross_val_score


def score(
    *, max_depth: int, min_samples_leaf: int, max_features: float, criterion: str = "gini", budget: float, seed: int
) -> dict[str, float]:
    """Accuracy over three folds, always the same. `budget`: the part of 120 trees that this rung grows."""
    x, y = load_digits(return_X_y=True)
    forest = RandomForestClassifier(
        n_estimators=round(120 * budget),
        max_depth=max_depth,
        min_samples_leaf=min_samples_leaf,
        max_features=max_features,
        criterion=criterion,
        random_state=seed,
        n_jobs=1,
    )
    folds = StratifiedKFold(n_splits=3, shuffle=True, random_state=0)
    accuracies = cross_val_score(forest, x, y, cv=folds)
    forest.fit(x, y)
    nodes = sum(tree.tree_.node_count for tree in forest.estimators_)
    print(f"{len(forest.estimators_)} trees, {nodes:,} nodes, accuracies {accuracies}")
    return {"score": float(np.mean(accuracies)), "spread": float(np.std(accuracies)), "nodes": float(nodes)}
