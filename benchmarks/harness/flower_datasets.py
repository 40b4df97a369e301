"""Local files in the place of the data sets that Flower's examples download, under the names that they ask for.

Pictures are those of `EDGEFL_DATA`, iris that of scikit-learn. HIGGS, the census incomes and the Titanic are tables
of random numbers with the columns of the real ones, and a rule that can be learned: what an app computes of them says
that it runs, not how well it learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.types import Dataset
from edgefl.tasks.datasets.central import load_central_data

IMAGE_SETS = {
    "uoft-cs/cifar10": ("cifar-10", "img"),
    "ylecun/mnist": ("mnist", "image"),
    "zalando-datasets/fashion_mnist": ("fashion-mnist", "image"),
}
CENSUS_WORDS = {
    "workclass": 7, "education": 16, "marital.status": 7, "occupation": 14, "relationship": 6, "race": 5, "sex": 2,
    "native.country": 40,
}  # fmt: skip
"""How many words a column has."""
CENSUS_NUMBERS = ("age", "fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week")
TABLE_ROWS = 900
HIGGS_TEST_ROWS = 500_000
"""What an example takes from the end of the training rows for its test."""


def write_data_sets(folder: Path, source: Path, *, num_images: int) -> None:
    """Writes them all; `source` holds the pictures, `num_images` are kept for training and a third for the test."""
    for name, (own, column) in IMAGE_SETS.items():
        data = load_central_data(own, source / own)
        train, test = (data.train, num_images), (data.test, num_images // 3)
        splits = {"train": train, "test": test}
        _write(folder / name, {part: _make_images(*split, column) for part, split in splits.items()})
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((HIGGS_TEST_ROWS + TABLE_ROWS, 28), np.float32)
    higgs = {"inputs": inputs, "label": (inputs[:, :3].sum(1) > 0).astype(float)}
    _write(folder / "jxie/higgs", {"train": higgs, "test": {key: rows[:300] for key, rows in higgs.items()}})
    _write(folder / "scikit-learn/adult-census-income", {"train": _make_census(rng)})
    _write(folder / "julien-c/titanic-survival", {"train": _make_passengers(rng)})
    _write_iris(folder)


def _make_images(images: Dataset, limit: int, column: str) -> Mapping[str, Any]:
    rows = np.random.default_rng(7).permutation(len(images.targets))[:limit]
    pixels = np.asarray(images.inputs[rows], np.uint8)
    if pixels.ndim == 4:  # channels first
        pixels = pixels.transpose(0, 2, 3, 1)
    return {column: [*pixels], "label": images.targets[rows].astype(int).tolist()}


def _make_census(rng: np.random.Generator) -> Mapping[str, Any]:
    numbers = {name: rng.integers(0, 100, TABLE_ROWS) for name in CENSUS_NUMBERS}
    words = {
        name: [f"{name} {word}" for word in rng.integers(0, count, TABLE_ROWS)]
        for name, count in CENSUS_WORDS.items()
    }
    is_rich = numbers["age"] + numbers["education.num"] > 100
    income = [">50K" if one else "<=50K" for one in is_rich]
    return {**{name: column.tolist() for name, column in numbers.items()}, **words, "income": income}


def _make_passengers(rng: np.random.Generator) -> Mapping[str, Any]:
    sexes = rng.integers(0, 2, TABLE_ROWS)
    return {
        "Survived": ((sexes + rng.random(TABLE_ROWS)) > 0.9).astype(int).tolist(),
        "Pclass": rng.integers(1, 4, TABLE_ROWS).tolist(),
        "Name": [f"{('Mr', 'Mrs')[sex]}. Nobody {row}" for row, sex in enumerate(sexes)],
        "Sex": [("male", "female")[sex] for sex in sexes],
        "Age": rng.integers(1, 80, TABLE_ROWS).astype(float).tolist(),
        "Siblings/Spouses Aboard": rng.integers(0, 4, TABLE_ROWS).tolist(),
        "Parents/Children Aboard": rng.integers(0, 4, TABLE_ROWS).tolist(),
        "Fare": (rng.random(TABLE_ROWS) * 100).tolist(),
    }


def _write_iris(folder: Path) -> None:
    from sklearn.datasets import load_iris  # noqa: PLC0415 optional

    iris = load_iris()
    rows = np.random.default_rng(7).permutation(len(iris.target))
    parts = ("sepal length", "sepal width", "petal length", "petal width")
    columns = {part: iris.data[rows, number].tolist() for number, part in enumerate(parts)}
    labels = iris.target[rows].tolist()
    own = {part.replace(" ", "_"): values for part, values in columns.items()}
    _write(folder / "hitorilabs/iris", {"train": {**own, "species": labels}})
    own = {part.title().replace(" ", "") + "Cm": values for part, values in columns.items()}
    _write(folder / "scikit-learn/iris", {"train": {"Id": list(range(len(labels))), **own, "Species": labels}})


def _write(path: Path, splits: Mapping[str, Mapping[str, Any]]) -> None:
    import datasets  # noqa: PLC0415 optional

    made = {}
    for name, columns in splits.items():
        dataset = datasets.Dataset.from_dict(dict(columns))
        for column in {"img", "image"} & columns.keys():
            dataset = datasets.Dataset.from_dict(
                dict(columns),
                features=datasets.Features({column: datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}),
            )
        made[name] = dataset
    datasets.DatasetDict(made).save_to_disk(str(path))
