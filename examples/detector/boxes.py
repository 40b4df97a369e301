"""Boxes as maps of cells, and the mean average precision of those that a model finds: sums that boards add up."""

import numpy as np

from edgefl import Metric

Array = np.ndarray

SIDE, CELL, MAX_OBJECTS, LABELS = 32, 4, 3, ("ellipse", "rectangle")
GRID, MIN_OVERLAP, NUM_BINS = SIDE // CELL, 0.5, 1000
HEAT = slice(0, len(LABELS))  # of a picture's maps; then come width, height and the centre's place in its cell


def find_peaks(heat: Array) -> Array:
    """Returns which of the cells [classes, g, g] are the largest of the 3x3 about them."""
    padded = np.pad(heat, [(0, 0), (1, 1), (1, 1)], constant_values=-np.inf)
    return heat == np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (-2, -1)).max((-2, -1))


def list_boxes(maps: Array, cells: Array) -> Array:
    """Returns [k, 4] left, top, right and bottom of the boxes whose centres lie in these cells [g, g]."""
    rows, columns = np.nonzero(cells)
    width, height, x, y = CELL * maps[len(LABELS) :, rows, columns]
    x, y = x + CELL * (columns + 0.5), y + CELL * (rows + 0.5)
    return np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)


def compute_overlaps(box: Array, boxes: Array) -> Array:
    """Returns [k] intersections over unions."""
    shared = (np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])).clip(0.0).prod(axis=1)
    area, areas = ((each[:, 2:] - each[:, :2]).clip(0.0).prod(axis=1) for each in (box[None], boxes))
    return shared / np.maximum(area + areas - shared, 1e-9)


class MeanAveragePrecision(Metric):
    """Mean over the classes of the area under precision by recall; a box is right with an overlap of 0.5.

    In each picture the surest box takes the true one that it covers best, then the next. How many of each score were
    right and how many wrong adds up; scores in one bin, 0.001 wide, count as equal.
    """

    direction = "max"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        found, true = np.zeros((2, len(LABELS), NUM_BINS)), np.zeros(len(LABELS))
        for row, (maps, wanted) in enumerate(zip(outputs, targets, strict=True)):
            weight = 1.0 if weights is None else float(weights[row])
            for label, is_peak in enumerate(find_peaks(maps[HEAT])):
                boxes, scores = list_boxes(maps, is_peak), 0.5 + 0.5 * np.tanh(0.5 * maps[label][is_peak])
                free = list_boxes(wanted, wanted[label] == 1.0)
                true[label] += weight * len(free)
                for number in np.argsort(-scores, kind="stable"):
                    overlaps = compute_overlaps(boxes[number], free)
                    is_right = bool(len(free)) and overlaps.max() >= MIN_OVERLAP
                    free = np.delete(free, overlaps.argmax(), axis=0) if is_right else free
                    found[int(is_right), label, min(int(NUM_BINS * scores[number]), NUM_BINS - 1)] += weight
        return {"found": found, "true": true}

    def combine(self, sums: dict[str, Array]) -> float:
        areas = []
        for wrong, right, true in zip(*sums["found"][..., ::-1], sums["true"], strict=True):
            precision = np.cumsum(right) / np.maximum(np.cumsum(right + wrong), 1e-9)
            areas += [np.maximum.accumulate(precision[::-1])[::-1] @ right / true] if true else []
        return float(np.mean(areas)) if areas else float("nan")
