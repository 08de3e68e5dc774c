"""Python's garbage collection in the training loop of several ranks: at the same steps on all of them.

Python collects after some number of allocations, so at another time on each rank, and now and then it looks at every
object: 0.2 s (measured with Detectron2) in which all other ranks wait for that one in a collective.
"""

import contextlib
import gc
from collections.abc import Iterator
from types import TracebackType

from .. import distributed

PERIOD = 50  # steps between two collections: until then, a cycle of objects may hold the memory of tensors


class GarbageCollector:
    """Collects garbage after a loop's first step, and every PERIOD steps from then on; enter it around the loop.

    Only the first collection takes long: the others leave out what exists then, such as the model and the data sets.
    Outside of steps (`automatic`), once the block ends, and in a single process, Python collects by itself.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_active = gc.isenabled() and distributed.world_size() > 1

    def __enter__(self) -> "GarbageCollector":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._is_active:
            self._let_python_collect()

    def count_step(self) -> None:
        """Collect if it is due after this step."""
        self._steps += 1
        if self._is_active and self._steps == 1:  # what a compilation needs exists now, too
            self._take_over()
        elif self._is_active and self._steps % PERIOD == 0:
            gc.collect()

    @contextlib.contextmanager
    def automatic(self) -> Iterator[None]:
        """Let Python collect until the block ends, in which the ranks may work on their own for long."""
        if not self._is_active:
            yield
            return
        self._let_python_collect()
        yield
        self._take_over()

    def _let_python_collect(self) -> None:
        gc.enable()
        gc.unfreeze()

    def _take_over(self) -> None:
        """Collect all garbage, exclude what is left from later collections, and switch automatic ones off."""
        gc.collect()
        gc.freeze()
        gc.disable()
