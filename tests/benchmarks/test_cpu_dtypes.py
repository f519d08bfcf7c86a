"""Both types of numbers multiply the same shapes."""

from benchmarks.cpu_dtypes import DTYPES, SHAPES, measure, products


def test_both_dtypes_multiply_the_same_shapes() -> None:
    sizes = [{name: product().shape for name, product in products(5, dtype).items()} for dtype in DTYPES]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 3 * len(SHAPES)
    assert sizes[0]["up, forward"] == (5, 1536) and sizes[0]["up, gradient of the weights"] == (1536, 576)
    assert all(len(seconds) == 2 for seconds in measure(5, rounds=1).values())
