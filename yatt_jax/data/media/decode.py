"""Media decoded and processed in grain's threads, in order; what is broken comes back as its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from yatt_jax.data.config import DataError
from yatt_jax.data.media.sources import Source

if TYPE_CHECKING:
    from yatt_jax.types import MediaItem


def decode_all(
    sources: Sequence[Source], make: Callable[[Source], MediaItem], workers: int
) -> list[MediaItem | DataError]:
    """The items of sources, in order.

    Args:
      sources: where they come from.
      make: fetches, decodes and processes one; runs in several threads.
      workers: threads.

    Returns:
      An item for each source, or why there is none.
    """

    def guarded(source: Source) -> MediaItem | DataError:
        try:
            return make(source)
        except DataError as error:
            return error

    if len(sources) < 2:
        return [guarded(source) for source in sources]
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(workers, 2))
    # Grain passes over elements that are None, and makes arrays of none: an item goes through as it is.
    return list(grain.MapDataset.source(list(sources)).map(guarded).to_iter_dataset(options))
