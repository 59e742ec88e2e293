"""Non-negative least squares (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). Knows matrices only."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """x ≥ 0 with the least |matrix · x − target|; columns may differ in scale by orders of magnitude."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    num_columns = matrix.shape[1]
    passive = np.zeros(num_columns, dtype=bool)
    found: Floats = np.zeros(num_columns)
    for _ in range(10 * num_columns):
        gradient = scaled.T @ (target - scaled @ found)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-10 * np.linalg.norm(target):
            break
        passive[best] = True
        while True:
            trial: Floats = np.zeros(num_columns)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if (trial[passive] > 0).all():
                found = trial
                break
            falling = passive & (trial <= 0)
            step = float(np.min(found[falling] / (found[falling] - trial[falling])))
            found = found + step * (trial - found)
            passive &= found > 1e-15
            found[~passive] = 0.0
    solution: Floats = found / scale
    return solution
