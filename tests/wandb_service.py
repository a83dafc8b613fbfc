"""A stand-in for W&B's service on this machine, and a reader of the files that W&B keeps offline."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "a" * 40


class Service:
    """Takes runs as the service does, and remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []  # the name of a query or mutation, and its variables
        self.streams: list[tuple[str, dict[str, Any]]] = []  # the id of a run, and what was sent to it
        self.files: dict[str, bytes] = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                answer = json.dumps(service.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST

            def log_message(self, *words: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/graphql"):
            asked = json.loads(body)
            found = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            name, variables = found[1] if found else "", asked.get("variables") or {}
            self.calls.append((name, variables))
            return {"data": self.data(name, variables)}
        if match := re.fullmatch(r"/files/e/p/(\w+)/file_stream", path):
            self.streams.append((match[1], json.loads(body)))
        elif path.startswith("/upload/"):
            self.files[path.removeprefix("/upload/")] = body
        return {}

    def data(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        if name == "UpsertBucket":
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "x", "name": variables["name"], "displayName": "r", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
        if name == "CreateArtifact":  # committed: the service has its files already
            sequence = {"id": "s", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.address}/upload/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if name == "Viewer":
            return {"viewer": {"id": "u", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}}
        if name == "GetDefaultEntity":
            return {"viewer": {"id": "u", "entity": "e"}}
        if name == "UpsertView2":
            return {"upsertView": {"view": {"id": "v", "name": "nw-abc-v"}, "inserted": True}}
        return {"project": {"artifact": None}} if name == "ArtifactType" else {}

    def of(self, name: str) -> list[dict[str, Any]]:
        return [variables for called, variables in self.calls if called == name]

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """What each run was announced with, by its id."""
        found: dict[str, dict[str, Any]] = {}
        for variables in self.of("UpsertBucket"):
            found.setdefault(variables["name"], variables)
        return found

    @property
    def exits(self) -> dict[str, int]:
        """The exit code of each run that was closed."""
        return {run: sent["exitcode"] for run, sent in self.streams if sent.get("complete")}

    def history(self, run: str) -> list[dict[str, Any]]:
        return self._lines(run, "wandb-history.jsonl")

    def summary(self, run: str) -> dict[str, Any]:
        return self._lines(run, "wandb-summary.json")[-1]

    def _lines(self, run: str, file: str) -> list[dict[str, Any]]:
        sent = [
            each["files"][file]["content"]
            for name, each in self.streams
            if name == run and file in each.get("files", {})
        ]
        return [json.loads(line) for content in sent for line in content]


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log of LevelDB's form whose entries are protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = file.read_bytes(), 7, b""  # behind W&B's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is too short for the header of a part
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(message)
            message = b""
            yield record
