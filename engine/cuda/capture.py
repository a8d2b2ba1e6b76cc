"""Work on the device, recorded once and repeated by one launch: CUDA graphs."""

from collections.abc import Callable

import torch

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Work on tensors that stay where they are → the same work, on what is in them then."""


def repeat(work: Work) -> Work:
    """Where there are no graphs."""
    return work


def cuda_capture(device: torch.device) -> Capture:
    """Graphs that share their memory: only one of them may be under way, in stream order. What a
    captured work leaves must lie outside. Captured on the caller's thread, while no other thread
    uses the device; replayed on the current stream of any."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(work: Work) -> Work:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()  # what libraries set up at the first use must not be captured
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
        return graph.replay

    return capture
