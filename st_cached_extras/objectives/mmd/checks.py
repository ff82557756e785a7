"""What distribution matching asks of its features, with errors that say the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def check_features(
    argument: str,
    features: Mapping[str, Tensor],
    names: Sequence[str],
    sample_shapes: Mapping[str, tuple[int, ...]],
    may_be_empty: bool = False,
) -> None:
    """Raise unless the features are those of ``names``, floating point, of these shapes, and of equally many rows."""
    missing = [name for name in names if name not in features]
    unknown = [name for name in features if name not in names]
    if missing or unknown:
        raise ValueError(
            f"{argument}: missing {missing or 'none'}, unknown {unknown or 'none'}, expected {list(names)}. Name the "
            "features as the references."
        )
    first = next(iter(features))
    for name, x in features.items():
        if not x.is_floating_point():
            raise TypeError(f"{argument}[{name!r}]: dtype {x.dtype}, expected a floating-point dtype.")
        if x.ndim < 2 or 0 in x.shape[1:] or (not len(x) and not may_be_empty):
            raise ValueError(f"{argument}[{name!r}]: shape {list(x.shape)}, expected [rows, ...], none of them 0.")
        expected = sample_shapes.get(name)
        if expected is not None and tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"{argument}[{name!r}]: a row of shape {list(x.shape[1:])}, expected {list(expected)} as its "
                "reference. Give the features that the reference was made from, or make a reference of these."
            )
        if len(x) != len(features[first]):
            raise ValueError(
                f"{argument}[{name!r}]: {len(x)} rows, expected {len(features[first])} as {first!r}. Every encoder "
                "sees the same samples."
            )


def check_statistic(statistic: str, chunk_size: int | None) -> None:
    """Raise a ValueError unless there is such a statistic, and the chunk is a positive int or None."""
    if statistic not in ("v", "u"):
        raise ValueError(
            f"statistic: found {statistic!r}, expected 'v' (every pair, never negative) or 'u' (no row with itself)."
        )
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size: found {chunk_size!r}, expected a positive int, or None to have it chosen.")
