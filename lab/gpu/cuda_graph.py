"""A token step on a GPU, recorded as a CUDA graph. On a CPU this file is never loaded."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


class Recording:
    """A step that is called once, then recorded as a CUDA graph, and from then on replayed with a
    single launch, because its hundreds of small kernels take longer to start than to run. In the
    first call libraries load kernels and take memory, which they must not do while recording."""

    def __init__(self, step: Callable[[], None], before: "Recording | None"):
        self.step, self.calls = step, 0
        # the graph that `before` recorded, until this recording has its own, which takes over the
        # memory of that one
        self.graph: torch.cuda.CUDAGraph | None = before.graph if before else None

    def __call__(self) -> None:
        if self.calls == 0:
            self.step()
        if self.calls == 1:
            graph = torch.cuda.CUDAGraph()  # torch.cuda.graph would wait and free all memory
            graph.capture_begin(self.graph.pool() if self.graph else None)
            self.step()  # recorded, but not carried out
            graph.capture_end()
            self.graph = graph
        if self.calls > 0 and self.graph:  # from the second call on there is one
            self.graph.replay()
        self.calls += 1


# One for each device, because libraries keep a workspace for every stream.
side_stream = cache(torch.cuda.Stream)


@contextmanager
def ready_to_record(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own, because the usual one cannot be recorded."""
    stream, usual = side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        yield
    usual.wait_stream(stream)
    torch.cuda.empty_cache()  # no other stream could use the memory that this one has kept
