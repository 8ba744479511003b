"""The server of bridges/serve.py in a process of its own, which misbehaves when it is told to.

    python -m bridges.tests.strange_server MODEL

POST /behave {"as": "silent"} changes what it does.
"""
import sys
import time
from pathlib import Path

from bridges.serve import Handler, serve
from qwen2_model import Linear


LIES = {  # what becomes of the log-probs of one answer
    "null": lambda values: [None, *values[1:]], "far off": lambda values: [*values[:-1], -9999.0],
    "zeros": lambda values: [0.0] * len(values)}
RPC = {  # what it replies to the request for other weights, and loads none
    "deaf": (200, {"results": [None]}), "failed": (500, {"error": "EngineDeadError"})}


class Strange(Handler):
    behaviour = ""
    request = None

    def do_POST(self):
        self.request = super().read_request()
        if self.path == "/behave":
            Strange.behaviour = self.request["as"]
            self.send(200, {})
        elif self.path == "/collective_rpc" and self.behaviour in RPC:
            self.send(*RPC[self.behaviour])
        elif self.path == "/collective_rpc" and self.behaviour == "in part":
            self.answer({self.path: self.load_in_part})
        elif self.path == "/v1/completions" and hasattr(self, f"be_{self.behaviour}"):
            getattr(self, f"be_{self.behaviour}")()
        else:
            super().do_POST()

    def read_request(self):
        return self.request

    def load_in_part(self, call):
        """Where the output matrix is the embeddings, it stays."""
        before = self.sampler.model.output_matrix
        self.sampler.load(call)
        self.sampler.model.lm_head = Linear(*reversed(before.shape), bias=False)
        self.sampler.model.lm_head.weight = before
        return {"results": [None]}

    def send(self, status, content):
        if self.path == "/v1/completions" and self.behaviour in LIES:
            holder = content["choices"][0]["logprobs"]
            holder["token_logprobs"] = LIES[self.behaviour](holder["token_logprobs"])
        super().send(status, content)

    def raw(self, status, body, **headers):
        self.protocol_version = "HTTP/1.1"  # which has chunks
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def be_silent(self):
        time.sleep(3)

    def be_slow(self):
        """A byte now and then: no single one of them is late."""
        self.raw(200, b"{", Content_Length="1000")
        for _ in range(30):
            time.sleep(0.1)
            self.wfile.write(b" ")

    def be_halved(self):
        self.raw(200, b'{"choices": [', Content_Length="1000")

    def be_gone(self):
        self.wfile.write(b"")

    def be_html(self):
        self.raw(200, b"<html>hello</html>")

    def be_empty(self):
        self.raw(200, b"{}")

    def be_huge(self):
        self.raw(200, b" " * 2 ** 22)

    def be_broken(self):
        self.raw(500, b"CUDA\nout of \x1b[31mmemory" + b"!" * 5000)

    def be_elsewhere(self):
        self.raw(302, b"", Location="/v1/models")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), 0, Strange)
