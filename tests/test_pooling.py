"""What follows from pooled hidden states on the host: cutting, normalizing, scores of classes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.outputs import Pooled, PoolingSpec, check_dimensions, class_scores, embedding_of

HIDDEN = Pooled(np.array([3.0, 4.0, 12.0], np.float32).tobytes())


def test_an_embedding_is_cut_before_it_is_normalized() -> None:
    spec = PoolingSpec(dimension=3, matryoshka=True)
    assert embedding_of(HIDDEN, spec).tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert embedding_of(HIDDEN, spec, 2).tolist() == pytest.approx([0.6, 0.8])
    assert embedding_of(HIDDEN, PoolingSpec(dimension=3, normalize=False), 2).tolist() == [3.0, 4.0]
    short = PoolingSpec(dimension=3, matryoshka=True, default_dimensions=2)
    assert embedding_of(HIDDEN, short).tolist() == embedding_of(HIDDEN, spec, 2).tolist(), "as the folder says"
    assert embedding_of(HIDDEN, short, 3).tolist() == embedding_of(HIDDEN, spec).tolist()
    assert embedding_of(Pooled(bytes(12)), spec).tolist() == [0.0, 0.0, 0.0], "no NaN"


def test_dimensions_are_refused_without_matryoshka_training() -> None:
    check_dimensions(PoolingSpec(dimension=8), 8)
    with pytest.raises(InvalidRequest, match="have 8 and can't be cut"):
        check_dimensions(PoolingSpec(dimension=8), 4)
    some = PoolingSpec(dimension=8, matryoshka=True, dimensions=(2, 4))
    check_dimensions(some, 4)
    with pytest.raises(InvalidRequest, match="dimensions is 3, but the model was trained for 2, 4"):
        check_dimensions(some, 3)
    with pytest.raises(InvalidRequest, match="must be 1 to 8"):
        check_dimensions(PoolingSpec(dimension=8, matryoshka=True), 9)


def test_scores_of_classes_follow_the_order_of_the_heads_rows() -> None:
    assert class_scores([0.0, math.log(3.0)], "softmax") == pytest.approx([0.25, 0.75])
    assert class_scores([0.0, -1e9], "sigmoid") == pytest.approx([0.5, 0.0])
    assert class_scores([2.5], "none") == [2.5]
