"""A graph runner for CUDA and HIP devices."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .runner import CaptureError, CapturingRunner, Step


class CudaGraphRunner(CapturingRunner):
    """Captures steps as CUDA graphs and replays them; see `GraphRunner`.

    Every step runs once on a side stream before it is captured there, so that kernels are
    compiled and libraries initialised. All graphs share one memory pool, whose memory a step may
    find overwritten by any other's: a speculator's static tensors lie outside. Graphs replay on
    the current stream. A key without a graph runs eagerly.

    Args:
        device: where steps run (default: the current device).

    Raises:
        RuntimeError: when there is no such device.

    Source: warm-up, pool and side stream as PyTorch's notes on CUDA graphs ask for.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def _warm_up(self, step: Step) -> None:
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                step()
        finally:
            caller.wait_stream(self._stream)

    def _record(self, step: Step) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        recording = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        try:
            # The outer context restores the caller's stream where ending a capture raises; an
            # empty graph is a step that ran on another device, and would replay as nothing.
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                warnings.filterwarnings("error", message="The CUDA Graph is empty")
                with torch.cuda.graph(recording, pool=self._pool, stream=self._stream):
                    try:
                        step()
                    except BaseException as error:
                        failure = error
        except (RuntimeError, UserWarning) as error:  # of ending it, which hides the step's own
            failure = failure or error
        if isinstance(failure, (RuntimeError, UserWarning)):
            raise CaptureError(f"the step ran, but cannot be captured: {failure}") from failure
        if failure is not None:
            raise failure
        return recording

    def _forget(self) -> None:
        super()._forget()
        self._pool = None  # a pool whose graphs are gone cannot be captured into again
