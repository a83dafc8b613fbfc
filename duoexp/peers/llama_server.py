"""The process of llama.cpp. It imports nothing of torch, whose threads and memory would be in the way."""

import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any


def serve(pipe: Connection, cores: Sequence[int] | None, settings: dict[str, Any]) -> None:
    """Answers (prompt, limit, eos) with `answer`, until the pipe closes. settings: of `llama_cpp.Llama`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle; the pipe then closes
    try:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # before its threads are born
        model = _loaded(settings)
        pipe.send(None)
        while True:
            pipe.send(_answer(model, *pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception:
        pipe.send(f"llama.cpp failed: {traceback.format_exc().strip().splitlines()[-1]}")


def _loaded(settings: dict[str, Any]) -> Any:
    import llama_cpp

    if settings["n_gpu_layers"] and not llama_cpp.llama_supports_gpu_offload():
        raise RuntimeError("this build knows no GPU, which the target runs on")
    return llama_cpp.Llama(**settings, verbose=False)


def _answer(model: Any, prompt: list[int], limit: int, eos: frozenset[int]) -> tuple[float, list[float], list[int]]:
    """When it began, and each token with the time at which it was there."""
    tokens, times = list[int](), list[float]()
    model.reset()  # or it would go on from what this prompt has in common with the last
    begun = time.perf_counter()
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        times.append(time.perf_counter())
        tokens.append(int(token))
        if token in eos or len(tokens) == limit:
            break
    return begun, times, tokens
