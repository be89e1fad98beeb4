"""Gradient boosting by XGBoost, for `cuadrilla tune`: benign or malignant (classes), or the course of diabetes (a
number). Both data sets are part of scikit-learn."""

from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import KFold, StratifiedKFold, cross_validate
from xgboost import XGBClassifier, XGBRegressor

TREES = 80


def classes(*, seed: int, **settings: float | int | str) -> dict[str, float]:
    """The mean negative log-likelihood over five folds; lower is better."""
    x, y = load_breast_cancer(return_X_y=True)
    model = XGBClassifier(n_estimators=TREES, n_jobs=1, random_state=seed, **settings)
    folds = StratifiedKFold(n_splits=5, shuffle=True, random_state=0)
    found = cross_validate(model, x, y, cv=folds, scoring=("neg_log_loss", "accuracy"))
    return {"score": -found["test_neg_log_loss"].mean(), "accuracy": found["test_accuracy"].mean()}


def disease(*, seed: int, **settings: float | int | str) -> float:
    """The root of the mean squared error over five folds; guessing the mean gives 77."""
    x, y = load_diabetes(return_X_y=True)
    model = XGBRegressor(n_estimators=TREES, n_jobs=1, random_state=seed, **settings)
    folds = KFold(n_splits=5, shuffle=True, random_state=0)
    squared = cross_validate(model, x, y, cv=folds, scoring="neg_mean_squared_error")["test_score"]
    return float((-squared.mean()) ** 0.5)
