"""Principal components in one round, from the exact covariance of all boards' examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from edgefl.core.analyses import BoardSums, PcaSettings
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.core.types import Array, Dataset, Task, Tensors
from edgefl.tasks.analyses.analysis import Analysis, make_exact_spec, pack_result
from edgefl.tasks.analyses.columns import select_columns
from edgefl.tasks.analyses.linear_regression import MAX_FEATURES, add_products
from edgefl.tasks.analyses.moments import centre_products, check_values, find_product_fault, sum_cross_products
from edgefl.tasks.metrics.exact_sums import WIDTH


class PrincipalComponents(Analysis):
    """The directions in which a task's columns vary most; no model of a task holds them."""

    is_of_whole_shard = True
    has_task_model = False

    def __init__(self, task: Task, settings: PcaSettings) -> None:
        """Raises ConfigError: the columns are not there, too many, or fewer than the components."""
        self._task_name, self._settings = task.name, settings
        self.columns = select_columns(task, settings.columns)
        count = len(self.columns.names)
        if count > MAX_FEATURES:
            raise ConfigError(
                f"strategy.columns must be at most {MAX_FEATURES} for pca, got {count}; name some, such as "
                f"0-{MAX_FEATURES - 1}"
            )
        if settings.components > count:
            raise ConfigError(f"strategy.components must be at most {count}, the columns, got {settings.components}")
        self.request_spec = (make_exact_spec("nothing", 1),)
        self.sums_spec = (make_exact_spec("products", count + 1, count + 1, WIDTH),)

    def make_model(self) -> dict[str, Array]:
        return pack_result({})

    def make_request(self, model: Tensors) -> dict[str, Array]:  # noqa: ARG002 one round needs nothing of it
        return {"nothing": np.zeros(1, np.int64)}

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:  # noqa: ARG002 likewise
        """Returns the sums of products of the columns and a column of ones.

        Raises:
            DataError: a value is missing: the components are of complete examples.
        """
        size = self.sums_spec[0].shape[0]
        if len(data) < self._settings.min_group:
            return {"products": np.zeros((size, size, WIDTH), np.int64)}
        columns = np.stack(
            [*(self.columns.read(data, column) for column in range(size - 1)), np.ones(len(data))], axis=1
        )
        check_values(columns, "the columns of a principal component")
        return {"products": sum_cross_products(columns, columns)}

    def find_fault(self, sums: Tensors) -> str | None:
        return find_product_fault(np.asarray(sums["products"]), is_weighted=False)

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:  # noqa: ARG002 likewise
        """Returns the result; raises `RunFailedError` where the boards have no two examples."""
        found = find_components(add_products(boards), self._settings.components)
        return pack_result({"v": 1, "task": self._task_name, "columns": list(self.columns.names), **found})


def find_components(products: Array, num_components: int) -> dict[str, Any]:
    """Returns mean, components, their variances (over n - 1) and the parts of all variance that these are.

    The largest entry of each component is positive.

    Args:
        products: [p + 1, p + 1] fractions, sums of products of columns and ones.
        num_components: at most p.
    """
    count, means, centred = centre_products(products)
    if count < 2:
        raise RunFailedError(f"components need two examples, the boards have {count}")
    covariance = (centred / (count - 1)).astype(float)
    variances, vectors = np.linalg.eigh(covariance)
    order = np.argsort(-variances, kind="stable")[:num_components]
    components = vectors[:, order].T
    largest = components[np.arange(len(order)), np.abs(components).argmax(axis=1)]
    total = float(np.trace(covariance))
    kept = np.maximum(variances[order], 0.0)
    return {
        "count": count,
        "mean": means.astype(float).tolist(),
        "components": (components * np.sign(largest)[:, None]).tolist(),
        "variances": kept.tolist(),
        "variance_ratios": (kept / total if total > 0 else kept).tolist(),
    }
