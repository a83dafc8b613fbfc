"""llama.cpp over the target's GGUF, in a process of its own: it brings its own threads, and can die of its build."""

import importlib.metadata
import importlib.util
import multiprocessing
import signal
from collections.abc import Sequence
from typing import Any

from duoexp.hardware import Hardware, Place
from duoexp.lm import sources
from duoexp.lm.load import Model
from duoexp.peers.base import Peer, Stock, Unavailable
from duoexp.peers.llama_server import serve
from duoexp.rounds import Round
from duoexp.schedule import Stop
from duoexp.worker import start_process

REBUILD = "CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"


class LlamaCpp(Peer):
    """Greedy decoding with llama-cpp-python, which computes with the file's own blocks and rounds activations to suit.

    So it holds the same weights, but its logits are not the target's: that its answers part is to be expected.
    """

    def __init__(self, n_ctx: int = 8192, n_batch: int = 512, flash_attn: bool = False) -> None:
        """The settings are llama.cpp's. n_ctx: what it makes room for, if the model's own context is not smaller."""
        self.settings = {"n_ctx": n_ctx, "n_batch": n_batch, "flash_attn": flash_attn}
        self._process: Any = None

    def check(self, target: str, stop: Sequence[str]) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise Unavailable('llama-cpp-python is not installed; pip install "duoexp[llama_cpp]" builds it')
        if stop:
            raise Unavailable(f"llama.cpp is not made to look for sampling.stop={list(stop)}; leave it empty")
        self._file = sources.gguf(target)
        if self._file is None:
            raise Unavailable(f"llama.cpp reads GGUF files, and the target {target} is none")
        self.package = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"

    def note(self, target: Model, draft: Model | None) -> str:
        how = "it computes with the blocks of the GGUF file and rounds activations to 8 bits, so that answers may part"
        return f"{super().note(target, draft)}; {how}"

    def start(self, target: Model, draft: Model | None, hardware: Hardware, place: Place, stock: Stock) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._room = min(self.settings["n_ctx"], target.config.get_text_config(decoder=True).max_position_embeddings)
        settings = self.settings | {"model_path": str(self._file), "n_ctx": self._room, "n_threads": place.threads}
        settings |= {"n_threads_batch": place.threads, "n_gpu_layers": 0 if place.device == "cpu" else -1}
        self._process = context.Process(
            target=serve, args=(child, place.cores, settings), name="duoexp-llama-cpp", daemon=True
        )
        start_process(self._process)
        child.close()
        self._receive()

    def rounds(self, prompt: Sequence[int], stop: Stop) -> Sequence[Round]:
        if len(prompt) + stop.left > self._room:
            raise Unavailable(
                f"{len(prompt)} tokens of a prompt and {stop.left} of its answer exceed llama.cpp's room of "
                f"{self._room}; raise draft.drafter.n_ctx"
            )
        self._pipe.send((list(prompt), stop.left, stop.eos))
        begun, times, tokens = self._receive()
        starts = [begun, *times[:-1]]
        return [_round(stop.keep([token]), start, end) for token, start, end in zip(tokens, starts, times, strict=True)]

    def close(self) -> None:
        if self._process is not None:
            self._pipe.close()  # which ends the child
            self._process.join(10)
            self._process.kill()

    def _receive(self) -> Any:
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(10)
            raise Unavailable(_death(self._process.exitcode)) from error
        if isinstance(message, str):
            raise Unavailable(message)
        return message


def _death(code: int | None) -> str:
    how = f"of {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
    way = f"it was built for another processor: {REBUILD}" if code == -signal.SIGILL else "look whether memory ran out"
    return f"llama.cpp's process died {how}; {way}"


def _round(tokens: tuple[int, ...], start: float, end: float) -> Round:
    return Round(
        tokens=tokens,
        accepted=0,
        rejected=False,
        head=None,
        verified=0,
        drafted=0,
        sequences=0,
        start_s=start,
        verify_s=end - start,
        wait_s=0.0,
        message_s=0.0,
        spans=(),
    )
