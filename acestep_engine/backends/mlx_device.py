"""Whether MLX runs here, found out by importing it; and what a thread that used it must do last.

It knows no models. A package that can be found may still lack its library, so that only the import
itself tells.
"""

from __future__ import annotations


def trouble() -> str | None:
    """Why MLX cannot be used on this machine, or None."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def available() -> bool:
    """Whether MLX can be used at all, on the GPU of a Mac or on a CPU."""
    return trouble() is None


def metal() -> bool:
    """Whether MLX computes on the GPU of a Mac."""
    if not available():
        return False
    import mlx.core as mx

    return mx.metal.is_available()


def clear_streams() -> None:
    """The last call of every thread of our own that used MLX; else the process aborts at exit."""
    import mlx.core as mx

    mx.clear_streams()


def clear_cache() -> None:
    """Give back the memory that MLX keeps of what was freed, for use by other programs."""
    import mlx.core as mx

    mx.clear_cache()
