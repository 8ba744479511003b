"""The sampler of this project as a server, in vLLM's words: with it --rollouts is tested, and tried
without a GPU. It takes one request after another, all from this machine and all as our own client
writes them.

    python -m bridges.tests.server models/tiny      then train.py --rollouts http://127.0.0.1:8000

It misbehaves when it is told to: POST /behave {"as": "silent"}.
"""
import json
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from engine.model_folder import read_model_folder
from engine.sampler import generate
from harness.load import set_threads
from qwen2_model import Linear, Qwen2

RPC = {  # what it replies to the request for other weights, and loads none
    "deaf": (200, {"results": [None]}), "failed": (500, {"error": "EngineDeadError"})}
SILENT = 1.5  # seconds
RAW = {  # status, body and headers of an answer
    "halved": (200, b'{"choices": [', {"Content-Length": "1000"}),
    "huge": (200, b"{}", {"Content-Length": str(10 ** 18)}),
    "endless": (200, b" " * 2 ** 25, {}),
    "html": (200, b"<html>hello</html>", {}),
    "broken": (500, b"CUDA\nout of \x1b[31mmemory" + b"!" * 5000, {})}


class Handler(BaseHTTPRequestHandler):
    model: Qwen2
    name = behaviour = ""  # of the model, and what it was told

    def do_GET(self):
        self.send({"/v1/models": 200}[self.path], {"data": [{"id": self.name}]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with suppress(OSError):  # the client waits no longer
            {"/v1/completions": self.complete, "/collective_rpc": self.load,
             "/behave": self.behave}[self.path](json.loads(body))

    def behave(self, request):
        Handler.behaviour = request["as"]
        self.send(200, {})

    def load(self, request):
        if self.behaviour in RPC:
            return self.send(*RPC[self.behaviour])
        assert request["method"] == "reload_weights"
        before = Handler.model.output_matrix
        Handler.model = read_model_folder(Path(request["kwargs"]["weights_path"]))
        if self.behaviour == "in part":  # where the output matrix is the embeddings, it stays
            self.model.lm_head = Linear(*reversed(before.shape), bias=False)
            self.model.lm_head.weight = before
        self.send(*RPC["deaf"])

    def complete(self, request):
        if self.behaviour in RAW:
            return self.raw(*RAW[self.behaviour])
        if self.behaviour == "silent":
            return time.sleep(SILENT)
        prompt = request["prompt"]
        sampled = generate(
            self.model, [prompt], answers=request["n"], seed=request["seed"],
            max_new_tokens=request["max_tokens"], temperature=request["temperature"],
            stop_ids=tuple(request["stop_token_ids"]))
        choices = [{"index": row, "token_ids": sampled.tokens[row, :length].tolist(),
                    "logprobs": {"token_logprobs": sampled.log_prob[row, :length].tolist()}}
                   for row, length in enumerate(sampled.mask.sum(1).tolist())]
        told = choices[0]["logprobs"]
        if self.behaviour == "null":
            told["token_logprobs"][0] = None
        self.send(200, {"model": self.name, "choices": choices})

    def send(self, status, content):
        body = json.dumps(content).encode()
        self.raw(status, body, {"Content-Length": str(len(body))})

    def raw(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing for each request."""


class Server(HTTPServer):
    request_queue_size = 128  # connections that wait for their turn; any more are reset


def serve(folder, port):
    Handler.name, Handler.model = str(folder), read_model_folder(folder)
    set_threads(0, Handler.model)
    server = Server(("127.0.0.1", port), Handler)
    print(f"{folder} answers at http://127.0.0.1:{server.server_port} until Ctrl-C", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("python -m bridges.tests.server MODEL [PORT]")
    serve(Path(sys.argv[1]), int((*sys.argv, 8000)[2]))
