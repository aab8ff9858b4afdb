"""Errors of matches as in the field: geodesic, on the source, over √area, × 100, at the places that shapes have."""

from itertools import permutations

import numpy as np
import torch
from matching_samples import batched, least_squares, sampled
from matching_spectra import geodesics
from tqdm import tqdm

THRESHOLDS = np.linspace(0, 25, 101)  # of curves, in the units of errors
FEATURES, SPECTRAL, REFINED = "nearest features", "functional map", "ZoomOut"
START, STEP = 20, 20  # eigenvectors of ZoomOut
ROWS = 1024  # of distances in memory


@torch.no_grad()
def unit_features(network, shape, k):
    """Directions (n, C) of the features of all points of a prepared shape."""
    batch = batched([sampled(shape, torch.arange(len(shape.points)), k)], k)
    return torch.nn.functional.normalize(network(batch)[0], dim=-1)


def nearest(points, queries):
    """Numbers (m,) of the points (n, d) that are nearest to queries (m, d)."""
    halves = points.square().sum(1) / 2
    return torch.cat([torch.addmm(halves, rows, points.T, alpha=-1).argmin(1) for rows in queries.split(ROWS)])


def point_maps(source, target, features, projection, is_refined):
    """Point maps (K,) from places of the target into the source, by name.

    Args:
        source: Prepared shape.
        target: Prepared shape.
        features: Of both, (n_s, C) and (n_t, C).
        projection: Φ⁺ (k, n_t) of the target.
        is_refined: Whether to refine maps by ZoomOut as well.

    Returns:
        Those of the nearest features, those of the functional map of these, and those of ZoomOut.
    """
    places, (S, T) = torch.from_numpy(target.shape.places), (shape.spectrum.vectors for shape in (source, target))
    near = nearest(*features)
    found = {FEATURES: near[places], SPECTRAL: nearest(S @ (projection @ S[near]).T, T[places])}
    if is_refined:
        for k in range(START, S.shape[1], STEP):
            near = nearest(S[:, :k] @ (projection[:k] @ S[near, :k]).T, T[:, :k])
        found[REFINED] = nearest(S @ (projection @ S[near]).T, T[places])
    return found


class Ruler:
    """Distances on a source from its places, in units of √area / 100."""

    def __init__(self, shape, cache):
        self._shape = shape
        self._rows, self._distances = geodesics(shape, cache)

    def errors(self, index):
        """Errors (K,) of points that were found at places, and up to the mirror; None if mirror images are unknown."""
        found = self._shape.nearest_vertex[np.asarray(index)]
        errors = self._between(self._shape.truth, found)
        if self._shape.mirrored is None:
            return errors, None
        return errors, np.minimum(errors, self._between(self._shape.mirrored, found))

    def _between(self, places, vertices):
        return 100 * self._distances[np.searchsorted(self._rows, places), vertices].astype(np.float32)


def evaluate(shapes, features, cache, is_refined=False):
    """Mean errors of all ordered pairs of prepared shapes with features, and curves, by kind of point map."""
    errors = {}
    projections = [least_squares(shape.spectrum.vectors, shape.mass) for shape in shapes]
    with tqdm(total=len(shapes) * (len(shapes) - 1), desc="pairs", disable=None) as bar:
        for i, source in enumerate(shapes):
            ruler = Ruler(source.shape, cache)
            for j, target in enumerate(shapes):
                if i != j:
                    maps = point_maps(source, target, (features[i], features[j]), projections[j], is_refined)
                    for name, index in maps.items():
                        errors.setdefault(name, []).append(ruler.errors(index))
                    bar.update()
    return {name: summary(pairs) for name, pairs in errors.items()}


def summary(pairs):
    """Means and curves of the errors of pairs, each (errors, errors up to the mirror or None)."""
    errors = np.stack([error for error, _ in pairs])  # (pairs, K)
    result = {
        "error": round(float(errors.mean()), 3),
        "worst pair": round(float(errors.mean(1).max()), 3),
        "percent below": [round(100 * float((errors <= threshold).mean()), 2) for threshold in THRESHOLDS],
    }
    if pairs[0][1] is not None:
        result["up to the mirror"] = round(float(np.mean([flipped for _, flipped in pairs])), 3)
    return result


def first_pairs(shapes, features, count):
    """Pairs (source, target, point map of features), each shape with one far from it in order, for a picture."""
    numbers = list(permutations(range(len(shapes)), 2))
    chosen = [numbers[place] for place in np.linspace(0, len(numbers) - 1, min(count, len(numbers))).astype(int)]
    return [(shapes[i], shapes[j], nearest(features[i], features[j])) for i, j in chosen]
