"""The server of bridges/serve.py in a process of its own, which misbehaves when it is told to.

    python -m bridges.tests.strange_server MODEL

POST /behave {"as": "silent"} changes what it does.
"""
import sys
import time
from pathlib import Path

from bridges.serve import Handler, serve
from qwen2_model import Linear


def first(content):
    return content["choices"][0]


def set_in_first(name, value):
    return lambda content: first(content).update({name: value})


def set_log_probs(change):
    def spoil(content):
        log_probs = first(content)["logprobs"]["token_logprobs"]
        first(content)["logprobs"]["token_logprobs"] = change(log_probs)
    return spoil


def set_tokens(change):
    """The log-probs get the length of the tokens, so that these alone are wrong."""
    def spoil(content):
        choice = first(content)
        choice["token_ids"] = change(choice["token_ids"], choice["prompt_token_ids"])
        choice["logprobs"]["token_logprobs"] = [-1.0] * len(choice["token_ids"])
    return spoil


END = 2  # <|im_end|> of the tests' tokenizer
SPOILT = {  # what an answer of the server becomes
    "no choices": lambda content: content.pop("choices"),
    "fewer": lambda content: content["choices"].pop(),
    "twice the same": set_in_first("index", 1),
    "a choice of text": lambda content: content["choices"].insert(0, "3 * 5"),
    "other prompt": set_in_first("prompt_token_ids", [1, 2, 3]),
    "no tokens": set_in_first("token_ids", None),
    "outside": set_tokens(lambda ids, prompt: [10 ** 6, *ids[1:]]),
    "negative": set_tokens(lambda ids, prompt: [-1, *ids[1:]]),
    "true": set_tokens(lambda ids, prompt: [True, *ids[1:]]),
    "too long": set_tokens(lambda ids, prompt: [5] * 1000),
    "breaks off": set_tokens(lambda ids, prompt: [5, 6]),
    "goes on": set_tokens(lambda ids, prompt: [5, END, 6, END]),
    "no log-probs": set_in_first("logprobs", None),
    "too few log-probs": set_log_probs(lambda values: values[1:]),
    "null": set_log_probs(lambda values: [None, *values[1:]]),
    "positive": set_log_probs(lambda values: [0.5, *values[1:]]),
    "nan": set_log_probs(lambda values: [float("nan"), *values[1:]]),
    "far below": set_log_probs(lambda values: [-1e300, *values[1:]]),
}


class Strange(Handler):
    behaviour = ""
    request = None

    def do_POST(self):
        self.request = super().read_request()
        if self.path == "/behave":
            Strange.behaviour = self.request["as"]
            self.send(200, {})
        elif self.path == "/collective_rpc" and self.behaviour in ("vllm", "vllm in part"):
            self.answer({self.path: self.reload_weights})
        elif self.path == "/collective_rpc" and self.behaviour == "vllm that failed":
            self.send(500, {"error": "EngineDeadError"})
        elif self.path == "/update_weights_from_disk" and self.behaviour == "deaf":
            self.send(200, {"success": True})
        elif self.path == "/update_weights_from_disk" and self.behaviour == "unable":
            self.send(200, {"success": False, "message": "not a model"})
        elif self.samples() and hasattr(self, f"be_{self.behaviour}"):
            getattr(self, f"be_{self.behaviour}")()
        else:
            super().do_POST()

    def read_request(self):
        return self.request

    def samples(self):
        """Whether answers are asked for, and not the log-probs of a prompt."""
        return self.path == "/v1/completions" and not self.request.get("echo")

    def reload_weights(self, call):
        """As vLLM is told to. In part: where the output matrix is the embeddings, it stays."""
        assert call["method"] == "reload_weights"
        before = self.sampler.model.output_matrix
        self.sampler.load({"model_path": call["kwargs"]["weights_path"]})
        if self.behaviour == "vllm in part":
            self.sampler.model.lm_head = Linear(*reversed(before.shape), bias=False)
            self.sampler.model.lm_head.weight = before
        return {"results": [None]}

    def send(self, status, content):
        if self.path == "/v1/models" and self.behaviour.startswith("vllm"):
            content["data"][0]["owned_by"] = "vllm"
        if self.path == "/v1/completions":
            if self.samples() and self.behaviour in SPOILT:
                SPOILT[self.behaviour](content)
            if self.behaviour == "unscored" and not self.samples():
                del first(content)["logprobs"]["token_logprobs"][:-1]
        super().send(status, content)

    def raw(self, status, body, **headers):
        self.protocol_version = "HTTP/1.1"  # which has chunks
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def be_silent(self):
        time.sleep(20)

    def be_slow(self):
        """A byte now and then: no single one of them is late."""
        self.raw(200, b"{", Content_Length="1000")
        for _ in range(200):
            time.sleep(0.1)
            self.wfile.write(b" ")

    def be_halved(self):
        self.raw(200, b'{"choices": [', Content_Length="1000")

    def be_gone(self):
        self.wfile.write(b"")

    def be_html(self):
        self.raw(200, b"<html>hello</html>")

    def be_list(self):
        self.raw(200, b"[]")

    def be_nested(self):
        self.raw(200, b"[" * 100_000)

    def be_huge(self):
        self.raw(200, b" " * 2 ** 22)

    def be_broken(self):
        self.raw(500, b"CUDA\nout of \x1b[31mmemory" + b"!" * 5000)

    def be_elsewhere(self):
        self.raw(302, b"", Location="/v1/models")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), 0, Strange)
