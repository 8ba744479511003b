"""The sampler of this project as a server: --rollouts can be tried with two terminals and no GPU.

    python -m tools.serve models/tiny
    python train.py --rollouts http://127.0.0.1:8000

It knows three requests, in the words of SGLang: GET /v1/models, POST /v1/completions with token
ids, POST /update_weights_from_disk. It answers this machine only, one request after another.
"""
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.files import parse_json
from engine.flags import Flag, Parser, add_flags, some_text, with_defaults
from engine.lab import set_threads
from engine.program import run_as_program
from engine.progress import say
from engine.sampler import generate
from qwen2_model import Qwen2

FLAGS = {"port": Flag(8000, "0 takes a free one", least=0, most=65535)}


class Sampler:
    """What answers: a model that can be exchanged for another between two requests."""

    def __init__(self, folder: Path):
        self.name = str(folder)
        self.model = Qwen2.from_pretrained(folder)
        self.one_at_a_time = threading.Lock()
        set_threads(0, self.model)

    def models(self, request: dict) -> dict:
        return {"data": [{"id": self.name, "owned_by": "grpo-credit-lab"}]}

    def load(self, request: dict) -> dict:
        self.model = Qwen2.from_pretrained(Path(request["model_path"]))
        return {"success": True}

    def complete(self, request: dict) -> dict:
        sampled = generate(
            self.model, [request["prompt"]], answers=request["n"], seed=request["seed"],
            max_new_tokens=request["max_tokens"], temperature=request["temperature"],
            stop_ids=tuple(request["stop_token_ids"]))
        choices = []
        for row, length in enumerate(sampled.mask.sum(1).tolist()):
            log_probs = sampled.log_prob[row, :length].tolist()
            choices.append({"index": row, "prompt_token_ids": request["prompt"],
                            "token_ids": sampled.tokens[row, :length].tolist(),
                            "logprobs": {"token_logprobs": log_probs}})
        return {"model": self.name, "choices": choices}


class Handler(BaseHTTPRequestHandler):
    sampler: Sampler  # of all requests

    def do_GET(self) -> None:
        self.answer({"/v1/models": self.sampler.models})

    def do_POST(self) -> None:
        self.answer({"/v1/completions": self.sampler.complete,
                     "/update_weights_from_disk": self.sampler.load})

    def answer(self, functions: dict) -> None:
        if self.path not in functions:
            return self.send(404, {"error": f"there is no {self.path} here"})
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with self.sampler.one_at_a_time:
                answer = functions[self.path](parse_json(body.decode() or "{}"))
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            return self.send(400, {"error": f"{type(error).__name__}: {error}"})
        self.send(200, answer)

    def send(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        with suppress(ConnectionError):  # the client waits no longer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Print nothing for each request."""


def serve(folder: Path, port: int, handler: type[Handler] = Handler) -> None:
    handler.sampler = Sampler(folder)
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    say(f"{folder} answers at http://127.0.0.1:{server.server_port} until Ctrl-C")
    server.serve_forever()


def main(argv: list[str]) -> None:
    parser = Parser("python -m tools.serve MODEL [--port N]", __doc__)
    parser.add_argument("model", metavar="MODEL", type=some_text, help="a model folder")
    given = add_flags(parser, FLAGS).read(argv)
    serve(Path(given.pop("model")), with_defaults(given, FLAGS).port)


if __name__ == "__main__":
    run_as_program("serve", main)
