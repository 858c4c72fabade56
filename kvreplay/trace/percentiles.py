"""Percentiles: one definition for all that is measured."""

import polars as pl


def nearest_rank(values: pl.Series, percent: int) -> float | None:
    """The measured value at index round(percent / 100 * (count - 1)), none between two; None where there is none."""
    value = values.quantile(percent / 100, interpolation="nearest")
    return None if value is None else float(value)
